"""`nox -s lint` finds tests that could pass although the code is wrong."""

from pathlib import Path

import pytest
from tooling.assertions import findings
from tooling.parsed_tests import Repository

FILES = {
    "src/ours.py": 'def a(): raise RareError("x")\ndef b(): raise CommonError("x")\ndef c(): raise CommonError("y")\n',
    "tests/support/checks.py": "def holds(x):\n    assert x\ndef other(x):\n    holds(x)\ndef nothing(x):\n    x()\n",
}
NO_ASSERTION = "has no test of its claim; it needs an assertion"
NOT_SURE = "it needs an assertion that runs whatever a collection or condition holds"
EMPTY = "all(...) also holds for nothing"
CLAIM = "def test_rows_are_sorted(rows=None):\n    "


def found(tmp_path: Path, text: str) -> list[str]:
    files = {**FILES, "tests/test_x.py": f"import pytest\nfrom checks import holds, other, nothing\n{text}\n"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return [one.text for one in findings(Repository(tmp_path, files), tmp_path / "tests/test_x.py")]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("rows.sort()", NO_ASSERTION),
        ("assert True", NO_ASSERTION),
        ("nothing(rows)", NO_ASSERTION),
        ("for row in rows:\n        assert row", NOT_SURE),
        ("for row in rows[1:]:\n        assert row", NOT_SURE),
        ("for row in [row for row in (1, 2) if row > 2]:\n        assert row", NOT_SURE),
        ("if rows:\n        assert rows[0]", NOT_SURE),
        ("assert all(row for row in rows)", EMPTY),
        ("assert len(rows) >= 0 and all(rows)", EMPTY),
        ("assert rows != 3 and all(one > 1 for one in rows)", EMPTY),
        ("for i in range(0):\n        assert i", NOT_SURE),
        ("with pytest.raises(ValueError):\n        rows.sort()", "pytest.raises(ValueError) has no match"),
        ("with pytest.raises(CommonError):\n        rows.sort()", "pytest.raises(CommonError) has no match"),
        ("with pytest.warns(UserWarning):\n        rows.sort()", "pytest.warns(UserWarning) has no match"),
        ("assert rows\n    pytest.skip('no')", "pytest.skip needs a reason"),
    ],
)
def test_what_could_pass_although_the_code_is_wrong_is_found(tmp_path: Path, body: str, says: str):
    (text,) = found(tmp_path, CLAIM + body)
    assert says in text


@pytest.mark.parametrize(
    "body",
    [
        "assert rows",
        "holds(rows)",
        "other(rows)",
        "pytest.fail('no')",
        "for row in (1, 2):\n        assert row",
        "for i in range(3):\n        assert i",
        "made = [2 * x for x in (1, 2)]\n    for row in made:\n        assert row",
        "assert len(rows) == 3\n    for row in rows:\n        assert row",
        "first = rows[0]\n    for row in rows:\n        assert row",
        "if rows:\n        assert rows[0]\n    else:\n        holds(rows)",
        "assert rows\n    assert all(row for row in rows)",
        "assert {row.kind for row in rows} == {'a'}\n    assert all(row for row in rows)",
        "assert all(row for row in (1, 2))",
        "with pytest.raises(ValueError, match='must be'):\n        rows.sort()",
        "with pytest.raises(RareError):\n        rows.sort()",
        "with pytest.raises(TimeoutError):\n        rows.sort()",
        "with pytest.raises(ValueError) as caught:\n        rows.sort()\n    assert caught.value.args == (3,)",
        "with pytest.raises(ValueError):\n        raise ValueError",
        "assert rows\n    pytest.skip('no GPU')",
    ],
)
def test_what_fails_when_the_code_is_wrong_is_accepted(tmp_path: Path, body: str):
    assert found(tmp_path, CLAIM + body) == []


@pytest.mark.parametrize("name", ["rows", "the_rows", "order_of_a_table", "it_all_works", "rows_are_correct"])
def test_names_without_a_claim_are_found(tmp_path: Path, name: str):
    (text,) = found(tmp_path, f"def test_{name}():\n    assert 1 + 1 == 2")
    assert "does not say what is asserted" in text


@pytest.mark.parametrize("marker", ["skip", "skip()", "skipif(True)", "xfail", "xfail(strict=True)"])
def test_marks_without_a_reason_are_found(tmp_path: Path, marker: str):
    (text,) = found(tmp_path, f"@pytest.mark.{marker}\n{CLAIM}assert rows")
    assert "needs a reason" in text
