import json
import os

import pytest

from rl_metrics.report.hang_part import MAX_STACK, describe_hang
from rl_metrics.run_record import open_run

STACK = """Thread 0x7f (most recent call first):
  File "/x/rl_core/link.py", line 44, in receive
  File "/x/rl_rollout/engine.py", line 120, in generate
"""


def write(folder, report):
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 100.0}\n')
    (folder / "hang.json").write_text(report if isinstance(report, str) else json.dumps(report))
    return open_run(folder)


def test_a_report_by_hand(tmp_path):
    role = {"name": "engine 1", "state": "serving", "since_s": 12.5, "is_answering": False, "leases": ["p-1"],
            "waits": [{"what": "room", "on": "queue", "since_s": 3}], "counts": {"running": 2},
            "stack": STACK}  # fmt: skip
    group = {"uid": "p-1", "state": "issued", "missing": [0, 2], "age_s": 9.0, "attempt": 2, "holder": None}
    run = write(tmp_path, {"at": "2026-01-01", "no_progress_s": 300.5, "last_progress": "step 4", "verdict": "it waits",
                           "causes": ["the queue is full"], "queue": {"ready": 3}, "roles": [role],
                           "groups": [group]})  # fmt: skip
    assert describe_hang(run) == {
        "is_over": False, "at": "2026-01-01", "no_progress_s": 300.5, "last_progress": "step 4", "verdict": "it waits",
        "causes": ["the queue is full"], "queue": [("ready", 3.0)],
        "roles": [role | {"counts": [("running", 2.0)], "where": ["receive (link.py:44)", "generate (engine.py:120)"]}],
        "groups": [group | {"holder": ""}],
    }  # fmt: skip


def test_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert describe_hang(open_run(tmp_path)) is None


def test_a_run_that_went_on(tmp_path):
    run = write(tmp_path, {"verdict": "it waits"})
    os.utime(tmp_path / "hang.json", (50.0, 50.0))
    assert describe_hang(run)["is_over"]


@pytest.mark.parametrize(
    "report",
    [
        {"roles": 5, "groups": "x", "causes": {"a": 1}, "queue": [1], "no_progress_s": "long", "verdict": 7, "at": []},
        {"roles": [1, None, {}, {"waits": [1, {}], "leases": 3, "counts": 4, "stack": 5, "name": ["x"]}]},
        {"groups": [None, {}, {"missing": ["a", True, 10**400], "age_s": 10**400, "attempt": "first", "holder": {}}]},
        {"no_progress_s": 1e999, "queue": {"a": None, "b": "c", "d": 10**400}},
    ],
)
def test_another_shape_is_left_out(tmp_path, report):
    described = describe_hang(write(tmp_path, report))
    assert set(described) == {
        *("is_over", "at", "no_progress_s", "last_progress", "verdict", "causes", "queue", "roles", "groups"),
    }
    assert described["verdict"]
    assert described["no_progress_s"] is None
    assert described["queue"] == []


@pytest.mark.parametrize("report", ["", "{", "[]", "7", "[" * 100_000])
def test_what_is_no_report(tmp_path, report):
    assert describe_hang(write(tmp_path, report)) is None


def test_long_ones_are_cut(tmp_path):
    role = {"name": "r" * 9_999, "stack": "s" * 99_999, "waits": [{"what": "w" * 3_000}] * 10}
    described = describe_hang(write(tmp_path, {"roles": [role] * 210, "causes": ["c" * 9_999] * 500}))
    assert len(json.dumps(described)) < 6_000_000
    assert (len(described["roles"]), len(described["causes"]), len(described["causes"][0])) == (200, 50, 2_000)
    (one,) = describe_hang(write(tmp_path, {"roles": [role]}))["roles"]
    assert len(one["stack"]) == MAX_STACK
