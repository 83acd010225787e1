"""Skipped updates are counted; too many in a row end the run and save the rows."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.row_keys import RowKey
from rl_distill.learner import StepResult
from rl_distill.skipping import NonFiniteError, SkippedUpdates, save_rows


def result(*, is_applied: bool, broken_rows: tuple[int, ...] = ()) -> StepResult:
    return StepResult(
        step=4,
        loss=float("nan"),
        grad_norm=float("nan"),
        learning_rate=0.1,
        metrics={},
        is_applied=is_applied,
        broken_rows=broken_rows,
    )


def batch() -> Batch:
    columns = {
        "input_ids": Ragged.from_rows([[1, 2], [3, 4, 5]], dtype="int32"),
        "advantages": Ragged.from_rows([[0.0, 1.0], [0.0, float("inf"), -1.0]], dtype="float32"),
        "reward": np.array([0.5, 1.0], dtype=np.float32),
    }
    return Batch([RowKey("a", 0, 0), RowKey("b", 1, 0)], columns)


def test_skips_in_a_row_are_put_up_with_until_there_is_one_more(tmp_path: Path):
    skipped = SkippedUpdates(most=2, directory=tmp_path)
    for _ in range(2):
        skipped.check(result(is_applied=False, broken_rows=(1,)), batch(), what="actor")
    assert (skipped.in_a_row, skipped.total) == (2, 2)

    with pytest.raises(NonFiniteError, match=r"skipped 3 updates of the actor in a row.*1 of 2 rows") as raised:
        skipped.check(result(is_applied=False, broken_rows=(1,)), batch(), what="actor")

    (file,) = tmp_path.iterdir()
    assert file.name == f"actor_step_{result(is_applied=False).step + 1}.jsonl"
    assert str(file) in str(raised.value)
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert list(line)[3:] == ["advantages", "input_ids", "reward"]
    assert line["prompt_uid"] == "b"
    assert line["input_ids"] == [3, 4, 5]
    assert line["advantages"] == [0.0, float("inf"), -1.0]
    assert line["reward"] == 1.0


def test_an_update_that_was_applied_starts_the_count_anew(tmp_path: Path):
    skipped = SkippedUpdates(most=1, directory=tmp_path)
    for is_applied in (False, True, False, True, False):
        skipped.check(result(is_applied=is_applied), batch(), what="actor")
    assert (skipped.in_a_row, skipped.total) == (1, 3)
    assert list(tmp_path.iterdir()) == []


def test_at_most_256_rows_are_saved_over_those_of_before(tmp_path: Path):
    ids = Ragged.from_rows([[row] for row in range(300)], dtype="int32")
    many = Batch([RowKey("a", row, 1) for row in range(300)], {"input_ids": ids})
    for rows, saved in ((range(300), 256), (range(44, 300), 256), ((299, 2), 2)):
        file = save_rows(many, tuple(rows), tmp_path / "of" / "run" / "rows.jsonl")
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        assert [line["session_index"] for line in lines] == list(rows)[:saved]
        assert lines[0] == {"prompt_uid": "a", "session_index": rows[0], "output_index": 1, "input_ids": [rows[0]]}


def test_where_no_row_is_to_blame_all_are_saved(tmp_path: Path):
    skipped = SkippedUpdates(most=0, directory=tmp_path)

    with pytest.raises(NonFiniteError, match="no single row"):
        skipped.check(result(is_applied=False), batch(), what="critic")

    (file,) = tmp_path.iterdir()
    assert file.name == "critic_step_5.jsonl"
    assert len(file.read_text().splitlines()) == 2
