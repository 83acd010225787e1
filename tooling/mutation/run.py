"""`nox -s mutate`: make random changes to sources, run the tests that reach each, and name what no test notices."""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tooling.mutation.changes import IDENTITY, Change, changes_of
from tooling.mutation.reach import PYTEST, Reach, record, recording_of
from tooling.mutation.site.sitecustomize import install

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / ".nox" / "mutation"
EQUIVALENT = ROOT / "tooling" / "mutation" / "equivalent.toml"
PRELOADED = ("torch", "transformers.models.qwen3.modeling_qwen3", "safetensors.torch", "pyarrow.dataset", "hypothesis")
"""Slow imports that every forked process shares; ours must not be among them, since a change is made on import."""
MEGATRON = ("megatron.core.parallel_state", "megatron.core.models.gpt", "megatron.core.optimizer")
NOTICED, SURVIVED, UNCOVERED = "noticed", "survived", "uncovered"
START_S, TEST_S = 90.0, 45.0
"""Seconds that a process or a test may take beyond ten times its usual time, before its change counts as noticed."""


@dataclass
class Outcome:
    """What the tests said of a change: `noticed` by which, or not, and after how many tests."""

    change: Change
    outcome: str
    by: str = ""
    tests: int = 0
    left_out: int = 0

    def json(self) -> dict[str, object]:
        """Return the fields for a file."""
        fields = {"outcome": self.outcome, "by": self.by, "tests": self.tests, "left_out": self.left_out}
        return {**self.change.json(), **fields}


@dataclass
class Job:
    """Work for a forked process, and what to do with its status and its log."""

    work: Callable[[], int]
    done: Callable[[int, str], None]
    deadline_s: float
    ends_at: float = 0.0
    log: Path = field(default_factory=Path)


class Chosen:
    """A plugin of pytest that runs the chosen tests in order, names the running one in a file, and ends a hang."""

    def __init__(self, tests: Mapping[str, float], report: Path) -> None:
        """Choose tests by their identifiers, with their usual seconds."""
        self.tests = tests
        self.order = {name: number for number, name in enumerate(tests)}
        self.report = report

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test runs: the last one has failed, unless all passed. SIGALRM ends the process if it hangs."""
        self.report.write_text(nodeid)
        signal.alarm(math.ceil(TEST_S + 10.0 * self.tests[nodeid]))

    def pytest_runtest_logfinish(self) -> None:
        """Let what follows take its time."""
        signal.alarm(0)


def run_jobs(jobs: Sequence[Job], *, at_once: int, folder: Path) -> None:
    """Run each job in a process forked from this one; a process that is late is killed with its children."""
    waiting, running = list(reversed(jobs)), dict[int, Job]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop()
                job.log = folder / f"{len(waiting)}.log"
                sys.stdout.flush()
                pid = os.fork()
                if not pid:
                    _in_child(job)
                job.ends_at = time.monotonic() + job.deadline_s
                running[pid] = job
            time.sleep(0.02)
            for pid, job in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = not ended and time.monotonic() > job.ends_at
                if ended or late:
                    _kill_group(pid)
                    if late:
                        os.waitpid(pid, 0)
                    del running[pid]
                    job.done(-signal.SIGKILL if late else os.waitstatus_to_exitcode(status), _text(job.log))
    finally:
        for pid in running:
            _kill_group(pid)


def _in_child(job: Job) -> None:
    status = 3
    try:
        os.setsid()
        output = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = job.work()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def project_of(path: Path) -> Path:
    """Return the package or app that a source belongs to."""
    for folder in path.parents:
        if folder.name == "src" and folder.parent.parent.parent == ROOT:
            return folder.parent
    raise SystemExit(f"expected files of packages/*/src or apps/*/src; found {path}")


def record_missing(tests: Sequence[str], *, at_once: int, folder: Path) -> list[Path]:
    """Record test files that changed since they were last recorded; return all recordings."""
    packages = sorted(path.name for path in ROOT.glob("*/*/src/rl_*") if path.is_dir())
    found = {test: recording_of(test, root=ROOT, folder=RECORDINGS) for test in tests}
    missing = [test for test, path in found.items() if not path.exists()]
    if missing:
        print(f"recording which lines {len(missing)} test files reach; later calls record only what changed")

    def job(test: str) -> Job:
        path = found[test]

        def done(status: int, log: str) -> None:
            shutil.rmtree(path.with_suffix(".coverage"), ignore_errors=True)
            print(f"  {test}" + ("" if status in (0, 5) else f": exit status {status}\n{log[-2000:]}"), flush=True)

        return Job(lambda: record(test, root=ROOT, packages=packages, output=path), done, 900.0)

    RECORDINGS.mkdir(parents=True, exist_ok=True)
    run_jobs([job(test) for test in missing], at_once=at_once, folder=folder)
    return [path for path in found.values() if path.exists()]


def enclosing(change: Change, source: bytes) -> tuple[int, list[tuple[int, int]], bool]:
    """Return a change's last line, the lines of the blocks around it, the innermost first, and if a function runs it.

    Imports run all others, such as defaults and constants.
    """
    last = change.line + source[change.span[0] : change.span[1]].count(b"\n")
    blocks, is_run = [], False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.Module):
            first = getattr(node, "lineno", 1)
            end = getattr(node, "end_lineno", None) or source.count(b"\n") + 1
            if first <= change.line and last <= end:
                blocks.append((first, end))
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                is_run |= is_function and node.body[0].lineno <= change.line
    return last, sorted(blocks, key=lambda block: block[1] - block[0]), is_run


def choose(reach: Reach, sets: Sequence[set[str]], *, limit_s: float) -> list[str]:
    """Order the tests of each set by files, the quickest file first, and leave out what exceeds the limit."""
    recorded, order = list(reach.seconds), list[str]()
    for tests in sets:
        by_file: dict[str, list[str]] = {}
        for test in sorted(tests, key=recorded.index):
            by_file.setdefault(test.partition("::")[0], []).append(test)
        for names in sorted(by_file.values(), key=lambda names: sum(reach.seconds[name] for name in names)):
            order += names
    chosen: list[str] = []
    spent = 0.0
    for name in order:
        spent += reach.seconds[name]
        if chosen and spent > limit_s:
            break
        chosen.append(name)
    return chosen


def try_changes(
    changes: Sequence[Change], reach: Reach, *, at_once: int, limit_s: float, folder: Path
) -> Iterator[Outcome]:
    """Run the tests that reach each change; yield the outcomes when all have ended, in the order of the changes."""
    outcomes: dict[int, Outcome] = {}
    jobs = []
    for number, change in enumerate(changes):
        source = (ROOT / change.file).read_bytes()
        last, blocks, is_run = enclosing(change, source)
        reaching = reach.of(change.file, change.line, last, blocks, is_run=is_run)
        tests = choose(reach, reaching, limit_s=limit_s)
        outcome = Outcome(change, UNCOVERED, tests=len(tests), left_out=sum(map(len, reaching)) - len(tests))
        outcomes[number] = outcome
        if not tests:
            print(describe(outcome), end="", flush=True)
            continue
        changed = folder / f"change-{number}.json"
        path = os.path.realpath(ROOT / change.file)
        changed.write_text(json.dumps({"path": path, "source": change.applied(source).decode()}))
        failed = folder / f"failed-{number}"

        def work(changed: Path = changed, tests: Sequence[str] = tests, failed: Path = failed) -> int:
            os.environ["RL_MUTATION"] = str(changed)
            content = json.loads(changed.read_text())
            install(content["path"], content["source"].encode())
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            words = [*PYTEST, "-x", "--tb=line", *files]
            plugin = Chosen({test: reach.seconds[test] for test in tests}, failed)
            return int(pytest.main(words, plugins=[plugin]))

        def done(status: int, _: str, outcome: Outcome = outcome, failed: Path = failed) -> None:
            outcome.outcome = SURVIVED if status == 0 else NOTICED
            outcome.by = (_text(failed) or "import") if status else ""
            print("." if status else describe(outcome), end="", flush=True)

        jobs.append(Job(work, done, START_S + 10.0 * sum(reach.seconds[name] for name in tests)))
    run_jobs(jobs, at_once=at_once, folder=folder)
    print()
    yield from outcomes.values()


def without_equivalent(changes: Sequence[Change], path: Path) -> list[Change]:
    """Leave out the changes that a file judges equivalent to the source: on certain lines, or wherever they are."""
    entries = tomllib.loads(path.read_text())["equivalent"]
    known = {tuple(each[name] for name in IDENTITY): each.get("lines", []) for each in entries}

    def is_judged(change: Change) -> bool:
        lines = known.get(change.identity)
        return lines is not None and (not lines or change.text_of_line(ROOT) in lines)

    return [change for change in changes if not is_judged(change)]


def describe(outcome: Outcome) -> str:
    """Say which change no test noticed."""
    change = outcome.change
    ran = f"{outcome.tests} tests" + (f", {outcome.left_out} left out" if outcome.left_out else "")
    where = f"{change.file}:{change.line} {change.function} [{change.kind}]"
    return f"\n{where} {outcome.outcome} ({ran})\n  - {change.before}\n  + {change.after}\n"


def report(outcomes: Sequence[Outcome], judged: int) -> None:
    """Print a row for each file."""
    by_file: dict[str, Counter[str]] = {}
    for each in outcomes:
        by_file.setdefault(each.change.file, Counter())[each.outcome] += 1
    width = max((len(file) for file in by_file), default=4)
    print(f"{'file':{width}}  changes  noticed  survived  uncovered")
    total = Counter[str]()
    for file, counts in sorted(by_file.items()):
        total += counts
        print(f"{file:{width}} {_row(counts)}")
    print(f"{'all':{width}} {_row(total)}")
    share = total[NOTICED] / max(1, total.total())
    print(f"\n{share:.1%} of {total.total()} changes were noticed; {judged} more are judged equivalent")


def _row(counts: Counter[str]) -> str:
    return f"{counts.total():8} {counts[NOTICED]:8} {counts[SURVIVED]:9} {counts[UNCOVERED]:10}"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="nox -s mutate --", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders in packages/*/src or apps/*/src")
    parser.add_argument("--sample", type=int, default=100, help="number of changes (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once (default: one a processor)")
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        help="seconds of tests a change, quick files first (default: 60)",
    )
    parser.add_argument(
        "--tests", nargs="*", action="extend", default=[], help="further test files, such as tests/test_sft.py"
    )
    parser.add_argument("--only-tests", nargs="*", help="these test files instead of the package's")
    parser.add_argument("--without", nargs="*", action="extend", default=[], help="test files to leave out")
    parser.add_argument("--replay", type=Path, help="try the changes of a file that --json wrote, but for the noticed")
    parser.add_argument("--equivalent", type=Path, default=EQUIVALENT, help="changes judged equivalent, with reasons")
    parser.add_argument("--json", type=Path, help="also write every change and its outcome to this file")
    options = parser.parse_args(words)
    if not options.paths and not options.replay:
        parser.error("name files or folders to change, for example packages/rl-core/src/rl_core/queue")
    named = [*options.paths, *options.tests, *(options.only_tests or ()), options.equivalent]
    if missing := [str(path) for path in [*named, options.replay or ROOT] if not Path(path).exists()]:
        parser.error(f"expected existing files or folders; found none at {', '.join(missing)}")
    if options.jobs < 1 or options.sample < 1:
        parser.error(f"--jobs and --sample must be at least 1; found {options.jobs} and {options.sample}")
    return options


def sample(options: argparse.Namespace) -> tuple[list[Change], int]:
    """Choose the changes; return them with the number of those left out because they are judged equivalent."""
    if options.replay:
        kept = [each for each in json.loads(options.replay.read_text())["changes"] if each["outcome"] != NOTICED]
        wanted = {tuple(each[name] for name in IDENTITY) for each in kept}
        files = sorted({each["file"] for each in kept})
        chosen = [each for file in files for each in changes_of(ROOT / file, root=ROOT) if each.identity in wanted]
    else:
        paths = [path.resolve() for path in options.paths]
        sources = sorted({file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))})
        every = [change for file in sources for change in changes_of(file, root=ROOT)]
        chosen = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    left = without_equivalent(chosen, options.equivalent)
    return sorted(left, key=lambda change: (change.file, change.span)), len(chosen) - len(left)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 0 unless there is nothing to change."""
    options = parse(words)
    changes, judged = sample(options)
    if not changes:
        print(f"nothing to change: {judged} changes are judged equivalent")
        return 1
    projects = sorted({project_of(ROOT / change.file) for change in changes})
    suites = options.only_tests or [
        str(file.relative_to(ROOT)) for project in projects for file in sorted(project.glob("tests/test_*.py"))
    ]
    tests = [test for test in [*suites, *options.tests] if test not in options.without]
    os.chdir(ROOT)
    needs_megatron = any(project.name == "rl-distill" or project.parent.name == "apps" for project in projects)
    _preload([*PRELOADED, *(MEGATRON if needs_megatron else ())])
    with tempfile.TemporaryDirectory(prefix="rl-mutation-") as name:
        folder = Path(name)
        reach = Reach.read(record_missing(tests, at_once=options.jobs, folder=folder), root=ROOT)
        print(f"{len(changes)} changes, {options.jobs} at once; a dot is one that tests noticed")
        tried = try_changes(changes, reach, at_once=options.jobs, limit_s=options.limit, folder=folder)
        outcomes = list(tried)
    report(outcomes, judged)
    if options.json:
        fields: dict[str, Any] = {"seed": options.seed, "equivalent": judged}
        options.json.write_text(json.dumps({**fields, "changes": [each.json() for each in outcomes]}, indent=1))
    return 0


def _preload(modules: Sequence[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # as conftest.py sets it, but torch reads it here
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT / "tooling" / "mutation" / "site"), os.environ.get("PYTHONPATH", "")])
    )
    for module in modules:
        importlib.import_module(module)
    ours = sorted(name for name in sys.modules if name.startswith("rl_") and "." not in name)
    if ours:
        raise SystemExit(f"expected none of our packages among the shared imports; found {ours}")
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
