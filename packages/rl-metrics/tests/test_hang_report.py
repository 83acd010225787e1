"""hang.json: written and read within bounds, and who does not answer in one sentence."""

import json
import math
from typing import Any

import pytest

from rl_core.cluster import RoleReport
from rl_core.errors import DataError
from rl_metrics.doctor.hang import innermost_frames
from rl_metrics.hang import HANG_FILE, HangReport, describe_trouble, read_hang_report, write_hang_report

SERVED = '  File "/x/rl_core/cluster/served.py", line 37, in run\n    return await result\n'
IDLE = 'pid 1 at 12:00:00\nthread MainThread (most recent call last):\n  File "/x/selectors.py", line 468, in select\n'


def inside(*frames: tuple[str, int, str]) -> str:
    """Return the stacks of a role in these frames, outermost first."""
    lines = "".join(f'  File "{file}", line {line}, in {name}\n    some code\n' for file, line, name in frames)
    return f"learner[0] is serving in pid 1\n{IDLE}thread worker (most recent call last):\n{SERVED}{lines}"


def dumped(*frames: tuple[str, int, str]) -> str:
    """Return the same stacks as dumped by a signal, innermost first."""
    lines = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in reversed(frames))
    served = '  File "/x/rl_core/cluster/served.py", line 36 in run\n'
    first = "(most recent call first):\n"
    return f"Stacks dumped by signal {first}Current thread 0x01 {first}{lines}{served}"


REDUCES = inside(("/y/step.py", 10, "train_step"), ("/z/torch/distributed/distributed_c10d.py", 2501, "all_reduce"))
STUCK = dumped(("/e/worker.py", 7, "execute"), ("/e/cuda.py", 9, "synchronize"))
SERVES = RoleReport(name="controller", stack=IDLE)


@pytest.mark.parametrize(
    ("roles", "queue", "troubles"),
    [
        ([SERVES, RoleReport(name="learner[0]", stack=REDUCES)], {"rows": 0.0}, []),
        (
            [SERVES, RoleReport(name="engine 1", is_answering=False, since_s=10, stack=STUCK)],
            {"rows": 0.0},
            ["engine 1 does not answer (for 10 s)"],
        ),
        (
            [RoleReport(name="learner", is_answering=False), RoleReport(name="teachers", state="dead", since_s=80)],
            {"rows": 0.0},
            ["learner does not answer (for 0 s)", "teachers is dead (for 80 s)"],
        ),
        ([SERVES, RoleReport(name="rollouter", state="restarting")], {}, ["rollouter is restarting (for 0 s)",
                                                                         "the queue does not answer"]),
    ],
)  # fmt: skip
def test_who_does_not_answer_is_named(roles, queue, troubles):
    assert list(describe_trouble(roles, queue)) == troubles


def test_the_summary_is_one_sentence():
    assert report().summary == "no progress for 1800 s; all roles answer"
    told = report(last_progress="step 3", causes=("learner does not answer", "the queue does not answer"))
    assert told.summary == "no progress for 1800 s, since: step 3; learner does not answer; the queue does not answer"


def test_the_frames_are_those_of_the_running_call():
    assert innermost_frames(REDUCES) == ["all_reduce (distributed_c10d.py:2501)", "train_step (step.py:10)"]
    assert innermost_frames(dumped(("/y/a.py", 1, "outer"), ("/y/a.py", 2, "inner"))) == [
        "inner (a.py:2)",
        "outer (a.py:1)",
    ]
    assert innermost_frames(dumped(("/y/a.py", 1, "outer"))) == ["outer (a.py:1)"]
    fetches = '  File "/y/b.py", line 8, in fetch\n  waits for a Future\n'
    task = f"{IDLE}task Task-3 (most recent call last):\n{SERVED}{fetches}"
    assert innermost_frames(task) == ["fetch (b.py:8)"]
    assert innermost_frames(IDLE) == ["select (selectors.py:468)"]
    assert innermost_frames("learner[0] is dead: killed") == []


def test_a_stack_is_shortened_to_its_innermost_frames():
    stack = 'thread main:\n  File "/a/loop.py", line 3 in run\n    go()\n  File "/a/socket.py", line 12 in recv\n'
    assert innermost_frames(stack) == ["recv (socket.py:12)", "run (loop.py:3)"]
    assert innermost_frames("most recent call first\n" + stack) == ["run (loop.py:3)", "recv (socket.py:12)"]
    assert innermost_frames(stack.partition("\n")[2])[0] == "recv (socket.py:12)"
    assert innermost_frames("") == []


def report(**changes: Any) -> HangReport:
    fields = {"at": "2030-01-01T00:00:00+00:00", "run": "runs/x", "no_progress_s": 1800.0}
    return HangReport(**(fields | changes))


def test_a_report_is_read_as_it_was_written(tmp_path):
    roles = (
        RoleReport(name="rollouter", doing="4 in the reward judge", stack="a\nb", counts={"running": 4.0}),
        RoleReport(name="engine 1", state="dead", is_answering=False, since_s=2.0),
    )
    written = report(roles=roles, queue={"rows": 3.0}, causes=("a", "b"), last_progress="step 3")
    write_hang_report(tmp_path / HANG_FILE, written)
    assert read_hang_report(tmp_path / HANG_FILE) == written
    content = json.loads((tmp_path / HANG_FILE).read_text())
    assert next(iter(content.items())) == ("summary", written.summary)
    assert content["roles"][0]["doing"] == "4 in the reward judge"


def test_what_json_lacks_is_left_out(tmp_path):
    roles = (RoleReport(name="engine 1", counts={"nan": math.nan, "running": 1.0}),)
    write_hang_report(tmp_path / HANG_FILE, report(roles=roles, causes=("v\ud800",), queue={"a": math.inf}))
    found = read_hang_report(tmp_path / HANG_FILE)
    assert (dict(found.roles[0].counts), dict(found.queue), found.causes) == ({"running": 1.0}, {}, ("v?",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"format": "rl-hang-2"}', "Object missing required field `at`"),
        (b"\xff\xfe", "JSON is malformed"),
        (b'{"at": "\xff", "run": "y", "no_progress_s": 1}', "utf-8"),
        (b'{"at": "x", "run": "y", "no_progress_s": 1, "format": "rl-hang-1"}', "Invalid enum value 'rl-hang-1'"),
        (b'{"at": "x", "run": "y", "no_progress_s": "long"}', "Expected `float`, got `str` - at `$.no_progress_s`"),
        (b'{"at": "x", "run": "y", "no_progress_s": 1e999}', "Number out of range"),
        (b'{"at": "x", "run": "y", "no_progress_s": 1, "roles": [{}]}', "required field `name` - at `$.roles[0]`"),
        (b'{"at": "x", "run": "y", "no_progress_s": 1, "last_progress": ' + b"[" * 9, "Expected `str`, got `array`"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, words):
    (tmp_path / HANG_FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"hang\.json is damaged") as caught:
        read_hang_report(tmp_path / HANG_FILE)
    assert words in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"hang\.json does not exist"):
        read_hang_report(tmp_path / HANG_FILE)
