"""Reports what the tests of a pytest run took and recorded to nox. The root conftest.py loads this plugin.

Each run appends one JSON line for each test to the file named by `RL_TEST_TIMES`: the test's name and its seconds,
fixtures included. It writes the names of all metrics of the runs, and of the service's clients, in its temporary
folders to the file named by `RL_TEST_METRICS`, which tests/test_recorded_metrics.py reads.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

TIMES_VARIABLE = "RL_TEST_TIMES"
METRICS_VARIABLE = "RL_TEST_METRICS"


class RunTimes:
    """Adds up the phases of each test; with pytest-xdist it runs in the controller, which receives all reports."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of one phase: setup, call or teardown."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Append the durations known so far; this also runs after Ctrl-C."""
        with self._file.open("a") as file:
            file.writelines(json.dumps({"test": name, "seconds": s}) + "\n" for name, s in self._seconds.items())


class RecordedMetrics:
    """Collects the names of metrics from the runs of all tests, which pytest keeps until two sessions later."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write one name a line; nothing if no test trained."""
        tests = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        files = [file for name in ("metrics", "histograms") for file in tests.rglob(f"{name}.jsonl")]
        runs = [one for one in files if (one.parent / "checkpoints").is_dir() or one.parent.parent.name == "clients"]
        rows = [json.loads(line) for file in runs for line in file.read_text().splitlines() if line.endswith("}")]
        if names := sorted({name for row in rows for name in (*row, *row.get("histograms", ()))}):
            self._file.write_text("\n".join(names))


def pytest_configure(config: pytest.Config) -> None:
    """Register, except in a worker of pytest-xdist: the controller reports its tests."""
    for variable, plugin in ((TIMES_VARIABLE, RunTimes), (METRICS_VARIABLE, RecordedMetrics)):
        file = os.environ.get(variable)
        if file and not hasattr(config, "workerinput"):
            config.pluginmanager.register(plugin(Path(file)))
