"""Programs run in UTF-8 mode in every locale."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from rl_core.terminal_text import use_utf8
use_utf8()
print(sys.getfilesystemencoding(), sys.argv[1:], Path(Path("path.txt").read_text()).exists())
"""


def test_a_path_in_a_file_exists_in_a_locale_with_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "gr\u00f6\u00dfe").touch()
    (tmp_path / "path.txt").write_text("gr\u00f6\u00dfe", encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM)
    other = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "program.py", "train", "a b"]
    said = subprocess.run(command, cwd=tmp_path, env=os.environ | other, capture_output=True, check=True, timeout=60)
    assert said.stdout.decode() == "utf-8 ['train', 'a b'] True\n"
