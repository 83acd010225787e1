"""What we say about other projects has a version and a month."""

from datetime import date
from pathlib import Path

import pytest
from tooling.claims import DOCUMENTS, NAMED, Mark, marks, outdated, unmarked

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_project_that_a_document_compares_with_has_a_version_and_a_month(name: str) -> None:
    text = (ROOT / name).read_text()
    assert NAMED.search(text)
    assert list(unmarked(text)) == []


def test_marks_are_read() -> None:
    text = "As in verl 0.9.1, 2026-11 (and TRL 1.16.0, 2026-09); slime main, 2026-08. TRL 1.15 is older."
    assert marks(text) == [
        Mark("verl", "0.9.1", 2026, 11),
        Mark("TRL", "1.16.0", 2026, 9),
        Mark("slime", "main", 2026, 8),
    ]


@pytest.mark.parametrize(
    "text", ["verl loses rows.", "| TRL |", "TransferQueue 0.1.11 is slower", "as of slime, 2026-08"]
)
def test_a_claim_without_them_is_found(text: str) -> None:
    (line,) = unmarked(text)
    assert "needs its version (or main) and the month" in line


def test_code_and_addresses_are_no_claims() -> None:
    assert list(unmarked("```bash\nrl-metrics import verl\n```\n[guide](guides/from-verl.md) `verl`")) == []


def test_a_release_lists_what_is_older_than_four_months(tmp_path: Path) -> None:
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "README.md").write_text("TRL 1.16.0, 2026-07, and verl 0.9.1, 2026-06, and TRL 1.0, 2025-12")
    found = outdated(tmp_path, date(2026, 11, 1))
    assert [line.split(", more")[0] for line in found] == [
        "README.md describes verl 0.9.1 as of 2026-06",
        "README.md describes TRL 1.0 as of 2025-12",
    ]
