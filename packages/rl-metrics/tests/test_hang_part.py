import json
import os

import pytest

from rl_metrics.report.run_parts import describe_hang
from rl_metrics.run_files.run_record import open_run

STACK = """Thread 0x7f (most recent call first):
  File "/x/rl_core/link.py", line 44, in receive
  File "/x/rl_rollout/engine.py", line 120, in generate
"""


def write(folder, report):
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 100.0}\n')
    required = {"at": "2026-01-01", "run": "runs/x", "no_progress_s": 300.5}
    (folder / "hang.json").write_text(report if isinstance(report, str) else json.dumps({**required, **report}))
    return open_run(folder)


def test_a_report_is_described_as_by_hand(tmp_path):
    role = {"name": "engine 1", "state": "serving", "since_s": 12.5, "is_answering": False, "doing": "2 responses",
            "counts": {"running": 2}, "stack": STACK}  # fmt: skip
    run = write(tmp_path, {"last_progress": "step 4", "causes": ["the queue does not answer"], "queue": {"ready": 3},
                           "roles": [role]})  # fmt: skip
    assert json.loads(json.dumps(describe_hang(run))) == {
        "format": "rl-hang-2", "run": "runs/x", "is_over": False, "at": "2026-01-01", "no_progress_s": 300.5,
        "last_progress": "step 4", "causes": ["the queue does not answer"], "queue": [["ready", 3.0]],
        "summary": "no progress for 300 s, since: step 4; the queue does not answer",
        "roles": [role | {"counts": [["running", 2.0]], "where": ["receive (link.py:44)", "generate (engine.py:120)"]}],
    }  # fmt: skip


def test_a_run_without_a_report_has_no_part(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert describe_hang(open_run(tmp_path)) is None


def test_a_run_that_went_on(tmp_path):
    run = write(tmp_path, {})
    os.utime(tmp_path / "hang.json", (50.0, 50.0))
    assert describe_hang(run)["is_over"]


@pytest.mark.parametrize(
    "report",
    [
        *("", "{", "[]", "7", "[" * 100_000),
        {"roles": 5},
        {"roles": [None]},
        {"roles": [{"name": ["x"]}]},
        {"roles": [{"name": "x", "since_s": 10**400}]},
        {"no_progress_s": 1e999},
        {"queue": {"b": "c"}},
    ],
)
def test_what_is_no_report_is_left_out(tmp_path, report):
    assert describe_hang(write(tmp_path, report)) is None
