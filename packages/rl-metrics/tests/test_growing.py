import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics.health import GUIDE, GrowingHistory, reads
from rl_metrics.run_files.history import History, read_history
from rl_metrics.trackers.jsonl import JsonlTracker


def columns(history):
    return {name: [None if np.isnan(value) else value for value in column] for name, column in history.values.items()}


def test_metrics_come_in_and_late_ones_too():
    growing = GrowingHistory(lambda name: name != "c")
    growing.add(1, {"a": 1.0, "c": 9.0})
    growing.add(2, {"b": 2.0})
    growing.add_late(1, {"b": 1.5})
    growing.add_late(7, {"b": 7.0})  # an unknown step
    assert growing.history().steps.tolist() == [1, 2]
    assert columns(growing.history()) == {"a": [1.0, None], "b": [1.5, 2.0]}


def test_a_step_that_comes_again_replaces_all_after_it():
    before = History(
        steps=np.array([1, 2, 3]), times=np.zeros(3), values={"a": np.array([1.0, 2.0, 3.0]), "c": np.zeros(3)}
    )
    growing = GrowingHistory(lambda name: name == "a", before=before)
    growing.add(2, {"a": 20.0})
    assert growing.history().steps.tolist() == [1, 2]
    assert columns(growing.history()) == {"a": [1.0, 20.0]}
    assert before.values["a"].tolist() == [1.0, 2.0, 3.0]


def test_what_the_rules_read():
    is_read = reads(GUIDE)
    assert is_read("actor/entropy")
    assert is_read("memory/trainer_gb")
    assert is_read("val-core/arithmetic/reward/mean@8")
    assert not is_read("training/epoch")


@given(st.lists(st.tuples(st.integers(0, 6), st.dictionaries(st.sampled_from("ab"), st.floats(0, 1)), st.booleans())))
def test_it_equals_what_the_file_says(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    tracker, growing = JsonlTracker(path), GrowingHistory(lambda _: True)
    for step, metrics, is_late in rows:
        if is_late:
            tracker.log_late(step, metrics)
            growing.add_late(step, metrics)
        else:
            tracker.log(step, metrics)
            growing.add(step, metrics)
    tracker.close()
    wanted, found = read_history(path), growing.history()
    assert found.steps.tolist() == wanted.steps.tolist()
    named = {name: column for name, column in columns(found).items() if any(value is not None for value in column)}
    assert json.dumps(named, sort_keys=True) == json.dumps(columns(wanted), sort_keys=True)
