"""Run tests with the instructions of older processors, and list what failed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import nox

from tooling.environments import ROOT
from tooling.runs import LOGS

PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "without AVX": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
}
"""For each kind of processor, the variables that restrict torch, oneDNN and MKL to its instructions."""
PASSED = (0, 5)  # 5: no test was selected


@dataclass(frozen=True)
class Suite:
    """Tests of one environment."""

    name: str
    python: str
    words: tuple[str, ...]
    """Arguments of pytest."""


def run_on_processors(session: nox.Session, suites: Sequence[Suite]) -> None:
    """Run each suite in a child process as each kind of processor; list all failures, then fail."""
    failed = []
    for processor in PROCESSORS:
        for suite in suites:
            found = list(failures(suite, processor))
            session.log(f"{suite.name} {processor}: {f'{len(found)} failed' if found else 'passed'}")
            failed += [f"{processor}: {one}" for one in found]
    for line in failed:
        session.warn(line)
    if failed:
        session.error(f"{len(failed)} failed; the output is in {LOGS.relative_to(ROOT)}/processors-*.txt")


def failures(suite: Suite, processor: str) -> Iterator[str]:
    """Run a suite as one kind of processor; yield the lines of its failed tests."""
    log = LOGS / (re.sub(r"\W+", "-", f"processors-{suite.name}-{processor}") + ".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [suite.python, "-m", "pytest", "-q", *suite.words]
    others = {name for names in PROCESSORS.values() for name in names}
    env = {name: value for name, value in os.environ.items() if name not in others}
    env |= PROCESSORS[processor]
    with log.open("wb") as output:
        status = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=output, check=False).returncode
    lines = re.findall(r"^(?:FAILED|ERROR) .*", log.read_text(errors="replace"), flags=re.MULTILINE)
    yield from lines
    if status not in PASSED and not lines:
        yield f"{suite.name}: pytest ended with status {status}; see {log}"
