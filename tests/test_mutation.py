"""`nox -s mutate`: which changes it makes, and what it says of a small package whose tests leave some unnoticed."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tooling.mutation.changes import IDENTITY, changes_of
from tooling.mutation.run import EQUIVALENT, parse

ROOT = Path(__file__).resolve().parents[1]
CHANGED = {
    "x < 2": {("compare", "(x <= 2)"), ("compare reversed", "(x > 2)"), ("constant", "3")},
    "x in y": {("compare", "(x not in y)")},
    "a and b or c": {
        ("and/or", "((a and b) and c)"),
        ("and/or", "(a or b)"),
        ("drop operand", "(a and b)"),
        ("drop operand", "(a)"),
        ("drop operand", "(b)"),
        ("drop operand", "(c)"),
    },
    "not x": {("remove not", "(x)")},
    "-x * 0.0": {("remove minus", "(x)"), ("arithmetic", "(-x / 0.0)"), ("constant", "1.0")},
    "x[a:b]": {("slice open", "None")},
    "[x for x in y if x]": {("drop filter", "True")},
    "a if b else c": {
        ("negate if", "(not (b))"),
        ("if True", "True"),
        ("if False", "False"),
        ("swap branches", "(c if b else a)"),
    },
    "any(x.abs().detach())": {
        ("function", "(all(x.abs().detach()))"),
        ("drop abs", "(x)"),
        ("drop detach", "(x.abs())"),
    },
    "'text' + f'{x + 1}'": set(),
}
SOURCE = '''
"""A module."""

LIMIT = 18
VERSION = 3


def is_adult(age: int) -> bool:
    """Whether a person is of age."""
    return age >= LIMIT


def in_child() -> int:
    return 6


def wait_for(is_over: bool) -> None:
    while is_over:
        pass


def is_never_called(x: int) -> int:
    return -x
'''
TESTS = """
import subprocess
import sys

from rl_small.ages import VERSION, is_adult, wait_for


def test_ages():
    assert is_adult(30)
    assert not is_adult(3)


def test_a_child():
    found = subprocess.run([sys.executable, "-c", "import rl_small.ages as a; print(a.in_child())"], stdout=-1)
    assert found.stdout == b"6\\n"


def test_the_version():  # runs no line of the module
    assert VERSION == 3


def test_waiting():
    wait_for(False)
"""


@pytest.mark.parametrize("expression", CHANGED)
def test_each_part_of_an_expression_is_changed(expression, tmp_path):
    path = tmp_path / "one.py"
    path.write_text(f"def f(a, b, c, x, y):\n    return ({expression})\n")
    found = [each for each in changes_of(path, root=tmp_path) if each.kind != "return None"]
    assert {(each.kind, each.after) for each in found} == CHANGED[expression]
    for each in found:
        changed = each.applied(path.read_bytes())
        assert changed != path.read_bytes()
        compile(changed, "one.py", "exec")


def test_statements_are_dropped_but_no_docstring_annotation_or_list_of_names(tmp_path):
    path = tmp_path / "one.py"
    path.write_text(
        '"""A text."""\n__all__ = [1]\n\nclass A:\n    """More."""\n    def f(self: 1) -> 2:\n        x: 3 = 4\n'
        "        x += g()\n        g()\n        raise x\n"
    )
    found = [(each.line, each.function, each.kind, each.after) for each in changes_of(path, root=tmp_path)]
    assert found == [
        (7, "A.f", "constant", "5"),
        (8, "A.f", "drop statement", "pass"),
        (8, "A.f", "arithmetic", "x -= g()"),
        (9, "A.f", "drop statement", "pass"),
        (10, "A.f", "drop raise", "pass"),
    ]


def test_it_names_what_no_test_notices_also_in_child_processes(tmp_path):
    shutil.copytree(ROOT / "tooling" / "mutation", tmp_path / "tooling" / "mutation")
    sources = tmp_path / "packages" / "rl-small" / "src"
    for path, text in ((sources / "rl_small" / "ages.py", SOURCE), (sources.parent / "tests" / "test_ages.py", TESTS)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (sources / "rl_small" / "__init__.py").touch()
    judged = tmp_path / "judged.toml"
    change = {"function": "is_never_called", "kind": "remove minus", "before": "-x", "after": "(x)", "reason": "unused"}
    change["file"] = "packages/rl-small/src/rl_small/ages.py"
    judged.write_text("[[equivalent]]\n" + "".join(f"{name} = {json.dumps(text)}\n" for name, text in change.items()))
    words = [str(sources), "--sample", "99", "--jobs", "2", "--equivalent", str(judged), "--json", "out.json"]
    program = f"from tooling.mutation import run; run.PRELOADED = (); run.TEST_S = 1; run.main({words!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{sources}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = {
        (each["function"], each["after"]): (each["outcome"], each["by"].rpartition("::")[2])
        for each in json.loads((tmp_path / "out.json").read_text())["changes"]
    }
    assert outcomes == {
        ("", "19"): ("survived", ""),
        ("", "4"): ("noticed", "test_the_version"),
        ("is_adult", "return None"): ("noticed", "test_ages"),
        ("is_adult", "(age > LIMIT)"): ("survived", ""),
        ("is_adult", "(age <= LIMIT)"): ("noticed", "test_ages"),
        ("in_child", "return None"): ("noticed", "test_a_child"),
        ("in_child", "7"): ("noticed", "test_a_child"),
        ("wait_for", "(not (is_over))"): ("noticed", "test_waiting"),
        ("wait_for", "False"): ("survived", ""),
        ("is_never_called", "return None"): ("uncovered", ""),
    }
    assert "60.0% of 10 changes were noticed; 1 more are judged equivalent" in done.stdout
    assert (sources / "rl_small" / "ages.py").read_text() == SOURCE


def test_every_change_that_is_judged_equivalent_is_still_in_the_source_and_has_a_reason():
    entries = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    assert entries
    for file in {entry["file"] for entry in entries}:
        possible: dict[tuple[str, ...], list[str]] = {}
        for each in changes_of(ROOT / file, root=ROOT):
            possible.setdefault(each.identity, []).append(each.text_of_line(ROOT))
        for entry in (entry for entry in entries if entry["file"] == file):
            found = possible[tuple(entry[name] for name in IDENTITY)]
            assert set(entry.get("lines", found)) <= set(found)
            assert "lines" in entry or len(found) == 1, f"{entry['before']} of {entry['function']} is on {found}"
            assert len(entry["reason"].split()) >= 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name files or folders to change"),
        (["nothing.py"], "found none at nothing.py"),
        (["tooling", "--only-tests", "nothing.py"], "found none at nothing.py"),
        (["--replay", "nothing.json"], "found none at nothing.json"),
        (["tooling", "--equivalent", "nothing.toml"], "found none at nothing.toml"),
        (["tooling", "--jobs", "0"], "at least 1; found 0 and 100"),
        (["tooling", "--jobs", "1", "--sample", "-3"], "at least 1; found 1 and -3"),
    ],
)
def test_mistakes_on_the_command_line_are_named(words, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=r"^2$"):
        parse(words)
    assert message in capsys.readouterr().err
