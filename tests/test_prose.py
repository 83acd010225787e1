"""The prose linter finds the prose in a file, and selects the files to check."""

import importlib.util
import json
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = '''"""Reads the rows of a file."""

LIMIT = "too short"


def read(path: str) -> int:
    """Read one row of the file.

    Args:
        path: A file with `rows` in rl_core.data, such as vLLM's.
    """
    raise ValueError(f"path must name a file with rows; found {path}.")
'''


@pytest.fixture(scope="module")
def prose() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("tooling_prose", ROOT / "tooling" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_and_messages_are_prose_and_names_are_code(prose: types.ModuleType):
    lines = [(text, line) for text, file, line in prose.python_lines("a.py", SOURCE) if text]
    assert sorted(lines, key=lambda line: line[1]) == [
        ("Reads the rows of a file.", 1),
        ("Read one row of the file.", 7),
        ("A file with `rows` in `x`, such as `x`.", 10),
        ("path must name a file with rows; found `x`.", 12),
    ]


def test_a_document_keeps_its_lines(prose: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("# Title\n\n`loss_mask` marks vLLM's tokens.\n")
    lines = [(text, line) for text, file, line in prose.document_lines("a.md")]
    assert lines == [("# Title", 1), ("", 2), ("`loss_mask` marks `x` tokens.", 3), ("", 0)]


def test_a_notebook_is_its_text_and_not_its_code(
    prose: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "An engine generates."]},
        {"cell_type": "code", "source": ["a = 'this is no text'"]},
        {"cell_type": "markdown", "source": ["A reward judges."]},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    lines = [text for text, _, _ in prose.document_lines("a.ipynb") if text]
    assert lines == ["# Title", "An engine generates.", "A reward judges."]


def test_every_rule_of_a_phrase_says_what_to_write_instead(prose: types.ModuleType):
    rules = prose.phrase_rules({"of which": "split the sentence"})
    assert list(rules) == ["Phrase0"]
    assert rules["Phrase0"].splitlines()[:2] == ["expr main (of which)", 'let message "Say: split the sentence."']


def test_documents_are_checked_and_the_code_of_tests_is_not(prose: types.ModuleType):
    checked = prose.tracked_files()
    assert {"README.md", "CONTRIBUTING.md"} <= set(checked)
    assert [file for file in checked if file.startswith("tests/") and file.endswith(".py")] == []
