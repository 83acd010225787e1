"""`nox -s soak -- processors`: tests in child processes with the variables of each kind of processor."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = """
import os

def test_any():
    assert {name: os.environ.get(name) for name in %(names)s} in %(all)s

def test_narrow():
    assert os.environ["ATEN_CPU_CAPABILITY"] != "avx2"
"""


class FailedError(Exception):
    """Stands for the error that nox's session.error raises."""


class Session:
    """The part of a nox session that `run_on_processors` needs."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.log = self.warn = self.said.append

    def error(self, line: str) -> None:
        raise FailedError(line)


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Load tooling/processors.py. It uses nox only in annotations, so an empty module can replace nox."""
    if importlib.util.find_spec("nox") is None:
        monkeypatch.setitem(sys.modules, "nox", types.ModuleType("nox"))
    for name in [name for name in sys.modules if name.startswith("tooling.")]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("tooling.processors")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "log")
    return module


def test_a_child_runs_with_each_set_of_variables_and_its_failures_are_listed(processors: Any, tmp_path: Path) -> None:
    sets = list(processors.PROCESSORS.values())
    names = sorted({name for one in sets for name in one})
    expected = [{name: one.get(name) for name in names} for one in sets]
    (tmp_path / "test_it.py").write_text(TEXT % {"names": names, "all": expected})
    session = Session()
    suites = [processors.Suite("mine", sys.executable, ("-p", "no:cacheprovider", "test_it.py"))]

    with pytest.raises(FailedError, match=r"1 failed; the output is in log/processors-\*\.txt"):
        processors.run_on_processors(session, suites)

    passed, failed, line = session.said
    assert (passed, failed) == ("mine without AVX: passed", "mine with AVX2: 1 failed")
    assert line.startswith("with AVX2: FAILED test_it.py::test_narrow")
    assert "1 failed, 1 passed" in (tmp_path / "log" / "processors-mine-with-AVX2.txt").read_text()


def test_a_child_that_ends_without_a_failed_test_is_listed_too(processors: Any, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import os\n\n\ndef test_it():\n    os._exit(7)\n")
    suite = processors.Suite("mine", sys.executable, ("-p", "no:cacheprovider", "test_it.py"))

    (line,) = processors.failures(suite, "with AVX2")

    assert line.startswith("mine: pytest ended with status 7; see ")
    assert not list(processors.failures(suite.__class__("none", sys.executable, ("-k", "nothing")), "with AVX2"))
