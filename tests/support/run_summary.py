"""Tells nox what a pytest run took, test by test; nox adds up the runs that it started.

Loaded by the conftest.py of the root. Each run appends lines of JSON to the file that `RL_TEST_TIMES` names: of a
test its name and seconds, fixtures included.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

TIMES_VARIABLE = "RL_TEST_TIMES"


class RunTimes:
    """Adds up the phases of each test; with pytest-xdist this runs where all reports come together."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test is over."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Append what there is, also after Ctrl-C."""
        with self._file.open("a") as file:
            file.writelines(json.dumps({"test": name, "seconds": s}) + "\n" for name, s in self._seconds.items())


def pytest_configure(config: pytest.Config) -> None:
    """Take part unless this is a worker, whose tests are reported elsewhere."""
    file = os.environ.get(TIMES_VARIABLE)
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunTimes(Path(file)))
