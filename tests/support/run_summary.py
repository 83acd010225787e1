"""Reports the duration of each test to nox, which sums up all the pytest runs it started.

The root conftest.py loads this plugin. Each run appends one JSON line for each test to the file named by
`RL_TEST_TIMES`: the test's name and its seconds, fixtures included.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

TIMES_VARIABLE = "RL_TEST_TIMES"


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


def pytest_configure(config: pytest.Config) -> None:
    """Register, except in a worker of pytest-xdist: the controller reports its tests."""
    file = os.environ.get(TIMES_VARIABLE)
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunTimes(Path(file)))
