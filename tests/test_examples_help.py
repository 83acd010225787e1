"""Every script of the examples says with --help what it does, and does nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [file for file in sorted(ROOT.glob("examples/*/*.py")) if '__name__ == "__main__"' in file.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_help_says_what_a_script_does(script: Path):
    says = ast.get_docstring(ast.parse(script.read_text()))
    assert says is not None
    done = subprocess.run(
        [sys.executable, script, "--help"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(says.split()[:8]) in " ".join(done.stdout.split())
