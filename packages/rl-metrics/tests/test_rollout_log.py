import json
import math
from dataclasses import replace

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError, NotReadyError
from rl_metrics.run_files.rollout_log import TOKEN_COLUMNS, RolloutLog, RolloutRow, read_rollouts

ROW = RolloutRow(
    step=3,
    time=7.0,
    prompt_uid="p0-e1",
    problem="p0",
    session=1,
    source="arithmetic",
    prompt="37+58=",
    response="95",
    ground_truth={"value": 95, "steps": ["9", None]},
    reward=1.0,
    components={"acc": 1.0, "format": math.nan},
    timings={"generate_s": 0.5, "preemptions": 1.0},
    policy_version=2,
    tokens=("9", "5"),
    mask=(True, False),
    columns={"token_ids": (9.0, 5.0), "rollout_logprobs": (-0.123456789, 0.0), "entropy": (0.5, 0.0)},
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollouts.jsonl"


def write(path, *batches):
    log = RolloutLog(path, clock=lambda: 7.0)
    for batch in batches:
        log.write(batch)
    log.close()


def row(step, uid="p"):
    return replace(ROW, step=step, prompt_uid=uid, components={})


def read(path):
    return [(one.step, one.prompt_uid) for one in read_rollouts(path)]


def test_what_is_written_is_read(path):
    write(path, [ROW])
    [found] = read_rollouts(path)
    assert math.isnan(found.components["format"])
    columns = {**ROW.columns, "rollout_logprobs": (-0.12346, 0.0)}
    assert replace(found, components={}) == replace(ROW, components={}, columns=columns)


def test_a_line_is_plain_json(path):
    write(path, [replace(ROW, reward=math.nan)])
    line = json.loads(path.read_text())
    assert (line["tokens"], line["mask"], line["token_ids"]) == (["9", "5"], [1, 0], [9, 5])
    assert (line["reward"], line["components"], line["index"]) == (None, {"acc": 1.0, "format": None}, 0)


def test_a_resumed_run_replaces_its_first_step_and_later_ones(path):
    write(path, [row(1, "a"), row(1, "b")], [row(2, "c")], [row(3, "d"), row(3, "e")])
    write(path, [row(2, "f"), row(2, "g")], [row(4, "h")])
    assert read(path) == [(1, "a"), (1, "b"), (2, "f"), (2, "g"), (4, "h")]


def test_the_same_step_again_replaces_it(path):
    write(path, [row(1, "a"), row(1, "b")])
    write(path, [row(1, "c")])
    assert read(path) == [(1, "c")]


def test_torn_and_foreign_lines_are_left_out(path):
    write(path, [row(1, "a")])
    with path.open("ab") as file:
        file.write(
            b'\xff\xfe\n[1]\n{"step":"2","index":0}\n{"step":1,"index":1,"prompt_uid":4}\n{"step":1,"index":2,"prom'
        )
    write(path, [row(2, "b")])
    with structlog.testing.capture_logs() as logs:
        assert read(path) == [(1, "a"), (2, "b")]
    assert logs == [{"event": "unreadable_lines", "log_level": "warning", "path": str(path), "count": 5}]


def test_a_last_line_on_its_way_and_blank_lines_are_no_reason_to_warn(path):
    write(path, [row(1, "a")])
    whole = path.read_bytes()
    for end in (b"\n  \n", whole[:-20], b'{"step":1,"index":1}'):
        path.write_bytes(whole + end)
        with structlog.testing.capture_logs() as logs:
            assert read(path) == [(1, "a")]
        assert logs == []


def test_a_number_beyond_every_float_is_refused():
    with pytest.raises(DataError, match="too large to convert to float"):
        RolloutRow.from_json({**ROW.to_json(), "versions": [10**400, 1]})


def test_a_file_that_is_not_there_gives_nothing(path):
    assert read(path) == []


@pytest.mark.parametrize("column", ["mask", *TOKEN_COLUMNS])
def test_columns_are_as_long_as_the_tokens(column):
    with pytest.raises(DataError, match=f"{column} of a trajectory must have a value for each of 2 tokens; found 3"):
        RolloutRow.from_json({**ROW.to_json(), column: [0, 0, 0]})


@pytest.mark.parametrize(
    "change", [{"prompt": None}, {"tokens": [1]}, {"reward": "1"}, {"components": []}, {"step": 1.5}, {"mask": "11"}]
)
def test_another_type_is_refused(change):
    with pytest.raises(DataError, match=r"a trajectory must have the fields of RolloutRow; "):
        RolloutRow.from_json({**ROW.to_json(), **change})


@given(text=st.text(st.characters(), max_size=20))
def test_texts_come_back_as_they_are(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("run") / "rollouts.jsonl"
    write(path, [replace(ROW, prompt=text, components={}, tokens=(text, text))])
    [found] = read_rollouts(path)
    expected = text.encode("utf-8", errors="replace").decode()
    assert (found.prompt, found.tokens) == (expected, (expected, expected))


def test_hostile_text_stays_on_one_line(path):
    text = "</script><script>alert(1)</script>\n\x00\u2028\u202e"
    write(path, [replace(ROW, response=text, components={})])
    assert len(path.read_bytes().splitlines()) == 1
    assert [one.response for one in read_rollouts(path)] == [text]


def test_a_closed_log_takes_nothing(path):
    log = RolloutLog(path)
    log.close()
    log.close()
    with pytest.raises(NotReadyError, match="is closed"):
        log.write([ROW])
