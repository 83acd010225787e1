import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError, ShapeError
from rl_metrics.reductions.async_training import summarize_processing_times, summarize_staleness
from rl_metrics.reductions.recorder import Recorder


def test_processing_times_by_hand():
    times = [4.0, 1.0, 3.0, 2.0, 10.0]
    assert summarize_processing_times(times) == {
        "fully_async/processing_time/avg": 4.0,
        "fully_async/processing_time/max": 10.0,
        "fully_async/processing_time/min": 1.0,
        "fully_async/processing_time/tp50": 3.0,
        "fully_async/processing_time/tp95": pytest.approx(8.8),  # 0.8 of the way from 4 to 10
        "fully_async/processing_time/tp99": pytest.approx(9.76),
    }


def test_without_groups_there_is_nothing_to_say():
    assert summarize_processing_times([]) == {}
    assert summarize_staleness([], [], policy_version=3) == {}


def test_staleness_and_spans_by_hand():
    found = summarize_staleness(np.array([5, 3, 4, 5]), np.array([5, 5, 5, 5]), policy_version=6)
    assert found == {
        "fully_async/staleness/mean": 1.75,
        "fully_async/staleness/max": 3.0,
        "fully_async/staleness/p50": 1.5,
        "fully_async/staleness/p95": pytest.approx(2.85),
        "fully_async/partial/total_partial_num": 2.0,
        "fully_async/partial/partial_ratio": 0.5,
        "fully_async/partial/max_partial_span": 2.0,
        "fully_async/partial/mean_partial_span": 1.5,
        "fully_async/count/stale_trajectory_processed": 4.0,
    }


def test_a_group_is_as_stale_as_its_oldest_token():
    found = summarize_staleness([5, 3, 6, 6], [5, 4, 6, 6], policy_version=6, group_index=[7, 7, 2, 2])
    assert found["fully_async/staleness/mean"] == 1.5
    assert found["fully_async/staleness/max"] == 3.0
    assert found["fully_async/partial/partial_ratio"] == 0.25


def test_a_trajectory_is_stale_when_any_token_is_older_than_the_policy():
    found = summarize_staleness([6, 5, 6, 4], [6, 6, 6, 4], policy_version=6, group_index=[7, 7, 2, 2])
    assert found["fully_async/count/stale_trajectory_processed"] == 2


def test_on_policy_is_zero_everywhere():
    assert set(summarize_staleness([4, 4], [4, 4], policy_version=4).values()) == {0.0}


@given(
    versions=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), min_size=1, max_size=20),
    ahead=st.integers(0, 5),
)
def test_a_newer_policy_adds_its_distance_and_changes_no_span(versions, ahead):
    oldest, newest = zip(*versions, strict=True)
    near = summarize_staleness(oldest, newest, policy_version=9)
    far = summarize_staleness(oldest, newest, policy_version=9 + ahead)
    for name, value in near.items():
        assert far[name] == pytest.approx(value + (ahead if "/staleness/" in name else 0)) or "/count/" in name


def test_every_name_is_defined():
    recorder = Recorder(strict=True)
    found = summarize_processing_times([1.0]) | summarize_staleness([1], [2], policy_version=3)
    recorder.record_all(found)
    assert recorder.reduce() == found


def test_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match=r"found \[1, 2\]"):
        summarize_processing_times([[1.0, 2.0]])
    with pytest.raises(ShapeError, match=r"\[2\], \[1\] and \[2\]"):
        summarize_staleness([1, 2], [1], policy_version=3)
    with pytest.raises(ShapeError, match=r"\[1\], \[1\] and \[2\]"):
        summarize_staleness([1], [1], policy_version=3, group_index=[0, 1])
    with pytest.raises(ShapeError, match=r"\[1, 2\], \[1, 2\] and \[1, 2\]"):
        summarize_staleness([[1, 2]], [[1, 2]], policy_version=3, group_index=[[0, 0]])


@pytest.mark.parametrize(
    ("oldest", "newest", "message"),
    [
        ([0, 3], [0, 2], "found 3 and 2 in row 1"),
        ([1], [4], "policy's 3; found 1 and 4"),
        ([3, 0], [3, 4], "policy's 3; found 0 and 4 in row 1"),
        ([0.5], [1], "float64"),
    ],
)
def test_impossible_versions_are_refused(oldest, newest, message):
    with pytest.raises(DataError, match=message):
        summarize_staleness(oldest, newest, policy_version=3)
