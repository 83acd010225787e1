"""Pytest runs the tests alike, whether nox, an editor or a shell calls it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WATCH = """\
import os, sys, pytest
class Watch:
    def find_spec(self, name, *_):
        if name == "numpy":
            print("threads of numpy:", os.environ.get("OMP_NUM_THREADS"), flush=True)
sys.meta_path.insert(0, Watch())
sys.exit(pytest.main(["--collect-only", "-qs", "-p", "no:cacheprovider", sys.argv[1]]))
"""


def test_variables_are_set_before_numpy_reads_them(tmp_path: Path):
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    tests = ROOT / "packages/rl-core/tests/test_ragged.py"
    words = [sys.executable, "-c", WATCH, tests]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120, check=False)
    seen = [line for line in done.stdout.splitlines() if line.startswith("threads of ")]
    assert (done.returncode, seen) == (0, ["threads of numpy: 1"]), done.stdout + done.stderr
