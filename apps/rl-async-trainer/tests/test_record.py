"""The record of a run over several launches."""

from pathlib import Path

import pytest

from rl_async_trainer.record import FILE, ScheduleRecord, read_history
from rl_core.errors import DataError
from rl_metrics.run_files.json_lines import read_json_lines


def record_steps(folder: Path, *, resumed: int, steps: dict[int, str]) -> None:
    """Record an attempt that trains steps of one group each."""
    record = ScheduleRecord(folder)
    record.write("resumed", step=resumed)
    for step, uid in steps.items():
        record.write("step", step=step, uids=[uid])
    record.close()


def test_lines_are_numbered_on_by_later_attempts(tmp_path: Path):
    record_steps(tmp_path, resumed=0, steps={1: "a", 2: "b"})
    record_steps(tmp_path, resumed=1, steps={2: "b"})
    assert [line["at"] for line in read_json_lines(tmp_path / FILE)] == [0, 1, 2, 3, 4]


def test_a_line_that_a_kill_has_torn_keeps_its_number(tmp_path: Path):
    record_steps(tmp_path, resumed=0, steps={1: "a"})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"at":2,"what":"st')
    record_steps(tmp_path, resumed=1, steps={})
    assert [line["at"] for line in read_json_lines(tmp_path / FILE)] == [0, 1, 3]


def test_steps_that_are_trained_again_the_same_way_keep_those_behind_them(tmp_path: Path):
    record_steps(tmp_path, resumed=0, steps={1: "a", 2: "b", 3: "c", 4: "d"})
    record_steps(tmp_path, resumed=1, steps={2: "b"})
    assert read_history(tmp_path).steps_after(1) == [("b",), ("c",), ("d",)]


def test_a_step_with_other_groups_voids_those_behind_it(tmp_path: Path):
    record_steps(tmp_path, resumed=0, steps={1: "a", 2: "b", 3: "c", 4: "d"})
    record_steps(tmp_path, resumed=1, steps={2: "b", 3: "x"})
    assert read_history(tmp_path).steps_after(0) == [("a",), ("b",), ("x",)]


@pytest.mark.parametrize("line", ['{"what":"issued"}', '{"what":"started","version":0}', '{"what":"step","step":1}'])
def test_a_line_without_its_groups_is_refused(tmp_path: Path, line: str):
    (tmp_path / FILE).write_text(f"{line}\n")
    with pytest.raises(DataError, match="has an invalid line"):
        read_history(tmp_path)
