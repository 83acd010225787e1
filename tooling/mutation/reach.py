"""Which tests reach a line: recorded once for each test file, with the lines that its child processes run."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

PYTEST = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Options of pytest. The parent has imported some of its plugins already."""
CHILDREN = -1
"""Test number of the lines that only child processes ran: every test of the file may have started them."""


class Tracer:
    """A plugin of pytest that measures the lines of each test, and how long it takes."""

    def __init__(self, data: Path, config: Path) -> None:
        """Measure into a file, with coverage's settings."""
        self.coverage = coverage.Coverage(data_file=str(data), config_file=str(config))
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Measure one test, with the fixtures that it is the first to need."""
        self.coverage.switch_context(item.nodeid)
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - began
            self.coverage.switch_context("")


def record(test_file: str, *, root: Path, packages: Sequence[str], output: Path) -> int:
    """Run a test file in this process and write which test reached which line; return pytest's status.

    The process must not have imported the packages. Lines that run when a module is imported belong to no test.
    """
    folder = output.with_suffix(".coverage")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config"
    config.write_text(
        "[run]\nparallel = true\nsigterm = true\npatch = fork, _exit\ncore = ctrace\n"
        f"source_pkgs = {','.join(packages)}\ndata_file = {folder / 'children'}\n"
        "disable_warnings = no-data-collected, module-not-imported, module-not-measured\n"
    )
    os.environ["COVERAGE_PROCESS_START"] = str(config)
    tracer = Tracer(folder / "own", config)
    tracer.coverage.start()
    status = pytest.main([*PYTEST, test_file], plugins=[tracer])
    tracer.coverage.stop()
    tracer.coverage.save()
    names = list(tracer.seconds)
    numbers = {name: number for number, name in enumerate(names)}
    lines: dict[str, dict[int, set[int]]] = {}
    for part in sorted(folder.iterdir()):
        if part == config:
            continue
        data = coverage.CoverageData(str(part))
        data.read()
        for measured in data.measured_files():
            file = os.path.relpath(os.path.realpath(measured), root)
            mine = lines.setdefault(file, {})
            for line, contexts in data.contexts_by_lineno(measured).items():
                found = {numbers[context] for context in contexts if context in numbers}
                if part.name.startswith("children"):
                    found.add(CHILDREN)
                mine.setdefault(line, set()).update(found)
    written = {
        "tests": tracer.seconds,
        "sources": {file: (root / file).read_text() for file in lines if (root / file).exists()},
        "lines": {file: {line: sorted(tests) for line, tests in mine.items()} for file, mine in lines.items()},
    }
    output.write_text(json.dumps(written))
    return int(status)


@dataclass
class Reach:
    """What the tests of a package reach.

    Attributes:
        seconds: Duration of each test, in seconds, by its identifier.
        lines: For each source, the identifiers of the tests that reach a line.
        new: For each source, the lines that it did not have when it was recorded.
        importing: For each source, the tests of the files that import it.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]
    new: dict[str, set[int]]
    importing: dict[str, set[str]]

    @classmethod
    def read(cls, recordings: Iterable[Path], *, root: Path) -> Reach:
        """Read recordings; lines that have moved since are found by comparing the sources."""
        reach = cls({}, {}, {}, {})
        moves: dict[tuple[str, str], Callable[[int], int]] = {}
        for path in recordings:
            recorded = json.loads(path.read_text())
            names = list(recorded["tests"])
            reach.seconds.update(recorded["tests"])
            for file, lines in recorded["lines"].items():
                before = recorded["sources"].get(file)
                if before is None or not (root / file).exists():
                    continue
                key = file, hashlib.sha256(before.encode()).hexdigest()
                if key not in moves:
                    moves[key], new = _moves(before, (root / file).read_text())
                    reach.new.setdefault(file, set()).update(new)
                reach.importing.setdefault(file, set()).update(names)
                mine = reach.lines.setdefault(file, {})
                for line, tests in lines.items():
                    found = names if CHILDREN in tests else [names[test] for test in tests]
                    mine.setdefault(moves[key](int(line)), set()).update(found)
        return reach

    def of(self, file: str, line: int, last: int, inside: Sequence[tuple[int, int]], *, is_run: bool) -> list[set[str]]:
        """Return the tests that reach a change, in one set; if imports run it, further ones of files with that import.

        Args:
            file: The source.
            line: First line of the change.
            last: Its last line.
            inside: First and last line of each statement around it, the innermost first, and of the module. If only
                imports run the innermost one, such as a default of a parameter, the tests of the next one count.
            is_run: Whether a function runs the change. For others, child processes that import the source are not
                enough.
        """
        mine = self.lines.get(file, {})
        new = self.new.get(file, set())
        if not any(number in mine or number in new for number in (*range(line, last + 1), inside[0][0])):
            return []
        importing: set[str] = set()
        own = [(line, last), (inside[0][0], inside[0][0])]
        for place, (first, end) in enumerate([*own, *inside]):
            found = set().union(*(mine.get(number, set()) for number in range(first, end + 1)))
            if found - importing and (is_run or place >= len(own)):
                break
            importing |= found
        else:
            found = importing
        return [found] if is_run else [found, self.importing[file] - found]


def _moves(before: str, after: str) -> tuple[Callable[[int], int], set[int]]:
    """Return where a line has moved, -1 if it is gone, and the lines that are new."""
    if before == after:
        return lambda line: line, set()
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    places = {a + i + 1: b + i + 1 for a, b, size in matcher.get_matching_blocks() for i in range(size)}
    return lambda line: places.get(line, -1), set(range(1, len(after.splitlines()) + 1)) - set(places.values())


def recording_of(test_file: str, *, root: Path, folder: Path) -> Path:
    """Return where the recording of a test file lies, by the contents of the file and of the shared test set-up."""
    digest = hashlib.sha256()
    path = root / test_file
    for each in (path, *sorted(path.parent.glob("conftest.py"))):
        digest.update(each.read_bytes())
    return folder / f"{test_file.replace('/', '-')}-{digest.hexdigest()[:16]}.json"


if __name__ == "__main__":
    sys.exit("run `nox -s mutate`")
