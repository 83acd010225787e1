import json
import math
import threading
import tracemalloc

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_metrics.run_files.history import read_history
from rl_metrics.trackers.jsonl import JsonlTracker, read_metrics

TEN = tuple(f"actor/metric_{number}" for number in range(10))

values = st.one_of(
    st.floats(),
    st.integers(-5, 5),
    st.none(),
    st.booleans(),
    st.sampled_from([10**400, -(2**63), 2**63, "1.5", "</script>", [1], {"a": [None]}, 1e308]),
)
steps = st.one_of(
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from([True, 1.0, -3, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, None, "1", math.nan]),
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "step": steps,
        "time": values,
        "late": st.sampled_from([True, True, False, 1, None, "x"]),
        **dict.fromkeys("abc", values),
    },
)


@st.composite
def lines(draw):
    row = draw(rows)
    names = draw(st.permutations(sorted(row)))
    text = json.dumps({name: row[name] for name in names})
    return draw(st.sampled_from([text, text, text, text, text[: len(text) // 2], "", "[1]", "{" * 500]))


def same_as_read_metrics(path):
    history, rows = read_history(path), read_metrics(path)
    assert history.steps.dtype == np.int64
    assert history.steps.tolist() == [row.step for row in rows]
    np.testing.assert_array_equal(history.times, [row.time for row in rows])
    assert set(history.values) == {name for row in rows for name in row.metrics}
    for name, column in history.values.items():
        np.testing.assert_array_equal(column, [row.metrics.get(name, math.nan) for row in rows])
    return history


@settings(deadline=None, max_examples=300)
@given(st.lists(lines(), max_size=30), st.sampled_from(["", "\n", "\r\n"]))
def test_any_file_reads_as_read_metrics_does(tmp_path_factory, written, end):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("\n".join(written) + end)
    same_as_read_metrics(path)


def test_repeated_and_late_lines_by_hand(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, clock=lambda: 7.0)
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0, "b": 2.5})
    tracker.log(3, {"a": 3.0})
    tracker.log_late(1, {"val": 10.0})
    tracker.log_late(3, {"val": 30.0})  # lost: step 3 is repeated below
    tracker.log_late(4, {"val": 40.0})  # lost: step 4 does not exist yet
    tracker.log(3, {"a": 33.0})
    tracker.log(4, {"a": math.nan})
    tracker.log_late(4, {"val": 41.0})
    tracker.log_late(4, {"val": 42.0})
    history = same_as_read_metrics(path)
    assert history.steps.tolist() == [1, 2, 3, 4]
    assert history.times.tolist() == [7.0] * 4
    np.testing.assert_array_equal(history.get("a"), [1.0, 2.0, 33.0, math.nan])
    np.testing.assert_array_equal(history.get("b"), [math.nan, 2.5, math.nan, math.nan])
    np.testing.assert_array_equal(history.get("val"), [10.0, math.nan, math.nan, 42.0])
    assert history.get("no such metric") is None
    assert "a" in history.values
    with pytest.raises(KeyError, match="no such metric"):
        history.values["no such metric"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"step":1', b"\x00" * 5000, b'{"late":true,"step":1}\n'])
def test_a_file_without_a_step_is_an_empty_history(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    history = same_as_read_metrics(path)
    assert len(history.steps) == len(history.times) == len(history.values) == 0


def test_numbers_that_other_trainers_write(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"nan":NaN,"inf":-Infinity,"large":1e999,"one":1}\n{"step":2,"one":true}\n')
    history = same_as_read_metrics(path)
    np.testing.assert_array_equal(history.get("one"), [1.0, 1.0])
    for name in ("nan", "inf", "large"):
        assert np.isnan(history.get(name)).all()


def test_torn_lines_in_the_middle_are_warned_of_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"a":1}\n{"step":2,"a"\n{"st\n{"step":3,"a":3}\n{"step":4,')
    with structlog.testing.capture_logs() as logs:
        assert read_history(path).steps.tolist() == [1, 3]
    assert logs == [
        {"event": "unreadable_lines", "log_level": "warning", "path": str(path), "count": 2, "first_line": 2}
    ]


def test_whole_steps_that_are_written_as_floats_are_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step":1,"a":1}\n{"step":2.0,"a":2}\n{"step":3e0,"late":false,"a":3}\n{"step":2.0,"late":true,"b":4}\n'
    )
    with structlog.testing.capture_logs() as logs:
        history = same_as_read_metrics(path)
    assert history.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(history.get("b"), [math.nan, 4.0, math.nan])
    assert logs == []


def test_lines_without_a_step_are_warned_of_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = ["1", "1.5", '"2"', "null", "true", "1e300", "NaN", str(2**63), "2"]
    path.write_text(
        '{"late":true,"time":1}\n\n{"step":0' + "".join(f',"a":1}}\n{{"step":{step}' for step in steps) + "}\n"
    )
    for read in (read_history, read_metrics):
        with structlog.testing.capture_logs() as logs:
            read(path)
        assert logs == [
            {"event": "lines_without_step", "log_level": "warning", "path": str(path), "count": 7, "first_line": 5}
        ]


@pytest.mark.one_python("it measures an algorithm")
def test_each_line_with_metrics_of_its_own_takes_memory_of_the_files_size(tmp_path):
    path = tmp_path / "metrics.jsonl"
    num_lines = 20_000  # 3 GB as a matrix
    path.write_text("".join(f'{{"step":{step},"metric/{step}":{step}}}\n' for step in range(num_lines)))
    tracemalloc.start()
    history = read_history(path)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert len(history.values) == num_lines
    assert np.nansum(history.get("metric/7")) == 7.0


def test_what_is_appended_while_a_reader_reads_is_seen_as_a_prefix(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    is_begun, is_enough = threading.Event(), threading.Event()

    def write():
        step = 0
        while not is_enough.is_set():
            step += 1
            tracker.log(step, {"a": float(step), "text" * 50: 0.5})
            is_begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert is_begun.wait(60)
        lengths = []
        for _ in range(20):
            history = read_history(path)
            assert history.steps.tolist() == list(range(1, len(history.steps) + 1))
            np.testing.assert_array_equal(history.get("a"), history.steps)
            lengths.append(len(history.steps))
        assert lengths == sorted(lengths)
        assert lengths[0] > 0
    finally:
        is_enough.set()
        writer.join()


def write_many(path, num_lines):
    numbers = ",".join(f'"{name}":%.6g' for name in TEN)
    draws = np.random.default_rng(0).random((1000, len(TEN)))
    tails = [numbers % tuple(draw) for draw in draws]
    with path.open("w") as file:
        for step in range(1, num_lines + 1):
            file.write(f'{{"step":{step},"time":{step},{tails[step % 1000]}}}\n')
    return draws


@pytest.mark.one_python("it measures an algorithm")
def test_100_000_lines_of_10_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    draws = write_many(path, 100_000)
    tracemalloc.start()
    history = read_history(path)
    assert tracemalloc.get_traced_memory()[1] < 5 * 100_000 * 12 * 8  # a few copies of the numbers, but no rows
    tracemalloc.stop()
    assert history.steps.tolist() == list(range(1, 100_001))
    assert tuple(history.values) == TEN
    np.testing.assert_allclose(history.get(TEN[3])[:999], draws[1:, 3], rtol=1e-5)


@pytest.mark.soak
def test_1_000_000_lines_of_10_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_many(path, 1_000_000)
    history = read_history(path)
    assert len(history.steps) == 1_000_000
    assert history.values
    assert all(np.isfinite(column).all() for column in history.values.values())
