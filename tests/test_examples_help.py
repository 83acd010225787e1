"""With --help, every script of the examples prints its help and does nothing else."""

import ast
import os
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [file for file in sorted(ROOT.glob("examples/*/*.py")) if '__name__ == "__main__"' in file.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_help_says_what_a_script_does(script, monkeypatch, capsys):
    neighbours = [file.stem for file in script.parent.glob("*.py")]  # other examples have modules of these names
    before = {name: sys.modules.pop(name) for name in neighbours if name in sys.modules}
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(os, "execv", lambda program, words: sys.exit(words[-1] != "--help"))  # the trainer's own help
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        for name in neighbours:
            sys.modules.pop(name, None)
        sys.modules.update(before)
    assert not ended.value.code
    says = ast.get_docstring(ast.parse(script.read_text()))
    assert says is not None
    assert " ".join(says.split()[:8]) in " ".join(capsys.readouterr().out.split())
