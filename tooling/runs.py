"""Run pytest, run sessions in parallel, and print the summary at the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nox

from tooling.environments import ROOT, STARTS

LOGS = ROOT / ".nox" / "log"
TIMES = "RL_TEST_TIMES"
"""Variable with the file to which each pytest run appends its tests' durations."""
METRICS = "RL_TEST_METRICS"
"""Variable with the file to which a pytest run writes the names of the metrics that its runs recorded."""
STOP_S = 120.0  # after Ctrl-C a child may still write its checkpoint


def run_pytest(session: nox.Session, python: str, *arguments: str) -> None:
    """Run pytest; the root conftest.py sets its variables."""
    runner = ("coverage", "run", "-m", "pytest") if "COVERAGE_FILE" in os.environ else ("pytest",)
    session.run(python, "-m", *runner, *arguments, interrupt_timeout=STOP_S)


@contextlib.contextmanager
def summary(session: nox.Session) -> Iterator[None]:
    """Log total time, processor time, the number of Python processes and the ten slowest tests."""
    if TIMES in os.environ:  # the parent nox logs it
        yield
        return
    began = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    times, starts = LOGS / "times.jsonl", LOGS / "starts"
    for name, file in ((TIMES, times), (STARTS, starts)):
        file.write_bytes(b"")
        os.environ[name] = str(file)
    try:
        yield
    finally:
        del os.environ[TIMES], os.environ[STARTS]
        rows = [json.loads(line) for line in times.read_text().splitlines()]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        session.log(
            f"{time.monotonic() - began:,.0f} s in total, {used.ru_utime + used.ru_stime:,.0f} s of processor time, "
            f"{starts.stat().st_size:,} Python processes, {len(rows):,} tests; the slowest:"
        )
        for row in sorted(rows, key=lambda row: -row["seconds"])[:10]:
            session.log(f"{row['seconds']:7.1f} s  {row['test']}")


@dataclass(frozen=True)
class Job:
    """A nox session in a separate process, with its output in a log."""

    session: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """Session and arguments, such as "unit rl-core"."""
        return " ".join((self.session, *self.words))

    @property
    def log(self) -> Path:
        """File with the output."""
        return LOGS / (re.sub(r"[^\w.]+", "-", self.name) + ".txt")

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in its own process group, so that Ctrl-C reaches it only once, from `end`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "nox", "--session", self.session, "--", *self.words]
        with self.log.open("wb") as output:
            return subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )


def run_jobs(session: nox.Session, jobs: Sequence[Job], *, at_once: int) -> None:
    """Run jobs in parallel; print a failed job's output at once, and fail after all have ended."""
    waiting, failed = list(jobs), []
    running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = job.start(), time.monotonic()
            time.sleep(0.1)
            for job, (process, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                took = f"after {time.monotonic() - began:.0f} s"
                if process.returncode == 0:
                    session.log(f"{job.name} passed {took}")
                    continue
                failed.append(job.name)
                session.log(f"{job.name} FAILED {took}; its output:\n{job.log.read_text(errors='replace')}")
    finally:
        end([process for process, _ in running.values()])
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt running jobs, as Ctrl-C does, and wait until they have ended."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        os.killpg(process.pid, signal.SIGINT)
    ends_at = time.monotonic() + STOP_S
    for process in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, ends_at - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # no deadline: the kernel ends a killed process
