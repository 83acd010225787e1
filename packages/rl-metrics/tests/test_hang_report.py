"""hang.json: written and read within bounds, and a verdict for every known kind of hang."""

import json
import math
from typing import Any

import pytest

from rl_core.cluster.role_report import RoleReport, Wait
from rl_core.errors import DataError
from rl_metrics.hang.report import (
    HANG_FILE,
    MAX_FILE_BYTES,
    MAX_GROUPS,
    MAX_STACK,
    GroupRow,
    HangReport,
    read_hang_report,
    write_hang_report,
)
from rl_metrics.hang.stack_places import innermost_frames, is_in_collective, place_of
from rl_metrics.hang.verdict import judge_hang

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
LOADS = inside(("/y/data.py", 20, "next_rows"), ("/y/data.py", 33, "read"))
GATHERS = inside(("/y/export.py", 4, "export"), ("/z/torch/distributed/distributed_c10d.py", 3100, "all_gather"))


def waits(name: str, *found: tuple[str, str, float], **changes: Any) -> RoleReport:
    return RoleReport(name=name, waits=tuple(Wait(what=w, on=on, since_s=s) for w, on, s in found), **changes)


def group(uid: str, age_s: float = 10.0, **changes: Any) -> GroupRow:
    return GroupRow(
        **({"uid": uid, "state": "issued", "missing": (2, 3), "age_s": age_s, "holder": "rollouter"} | changes)
    )


LEARNER = waits("learner", ("3 of 8 groups", "groups", 312))
CONTROLLER = waits("controller", ("events", "rollouter", 20), ("step 4", "learner", 312))
IN_FLIGHT = {"groups/issued": 3.0, "rows": 10.0}
GROUPS = [group("p-20"), group("p-17", 312.0, attempt=2), group("p-19", 30.0)]

SITUATIONS: dict[str, tuple[list[RoleReport], dict[str, float], list[GroupRow], list[str], list[str]]] = {
    "a reward does not answer": (
        [
            CONTROLLER,
            LEARNER,
            waits("rollouter", ("tokens", "engine 0", 3), ("the score of p-17", "reward judge", 310)),
        ],
        IN_FLIGHT,
        GROUPS,
        ["reward judge has not answered rollouter for 310 s"],
        [
            "Controller has waited 312 s for step 4 from learner",
            "learner has waited 312 s for 3 of 8 groups (3 are not settled; the oldest, p-17, 312 s old, attempt 2, "
            "lacks sessions 2, 3); p-17 is held by rollouter",
            "rollouter has waited 310 s for the score of p-17 from reward judge",
        ],
    ),
    "a reward does not answer, and everybody waits": (
        [
            waits("controller", ("3 of 8 groups of step 4", "groups", 312)),
            waits("rollouter", ("4 groups, the oldest p-17", "the reward judge", 312)),
            waits("learner", ("the next order", "controller", 311)),
        ],
        IN_FLIGHT,
        GROUPS,
        ["the reward judge has not answered rollouter for 312 s"],
        [
            "Learner has waited 311 s for the next order from controller",
            "controller has waited 312 s for 3 of 8 groups of step 4 (3 are not settled; the oldest, p-17, ",
            "rollouter has waited 312 s for 4 groups, the oldest p-17 from the reward judge",
        ],
    ),
    "a rank does not answer, and the others wait for it": (
        [
            waits("controller", ("step 4", "learner", 312)),
            waits("learner", ("step 4", "rank", 311)),
            RoleReport(name="rank[0]", stack=REDUCES),
            RoleReport(name="rank[1]", since_s=8, is_answering=False),
        ],
        IN_FLIGHT,
        GROUPS,
        ["rank[1] does not answer (for 8 s)"],
        ["learner has waited 311 s for step 4 from rank[1]; rank[1] does not answer"],
    ),
    "an engine does not answer": (
        [
            LEARNER,
            waits("rollouter", ("tokens of p-17", "engine 1", 305)),
            RoleReport(
                name="engine 1",
                is_answering=False,
                since_s=10,
                stack=dumped(("/e/worker.py", 7, "execute"), ("/e/cuda.py", 9, "synchronize")),
            ),
        ],
        IN_FLIGHT,
        GROUPS,
        ["engine 1 does not answer (for 10 s, it is in synchronize (cuda.py:9), called by execute (worker.py:7))"],
        ["rollouter has waited 305 s for tokens of p-17 from engine 1"],
    ),
    "a role is being restarted": (
        [LEARNER, RoleReport(name="rollouter", state="restarting", since_s=280)],
        IN_FLIGHT,
        GROUPS,
        ["rollouter is restarting (for 280 s)"],
        ["p-17 is held by rollouter"],
    ),
    "a dead role that nobody waits for is told beside the chain": (
        [LEARNER, waits("rollouter", ("a tool", "http://tools", 300)), RoleReport(name="teacher", state="dead")],
        IN_FLIGHT,
        GROUPS,
        ["http://tools has not answered rollouter for 300 s", "teacher is dead (for 0 s)"],
        ["Teacher is dead"],
    ),
    "two roles wait for each other": (
        [
            waits("learner", ("the weights to be taken", "rollouter", 90)),
            waits("rollouter", ("logprobs", "learner", 95)),
        ],
        {},
        [],
        ["deadlock: learner waits for rollouter, rollouter waits for learner"],
        ["Learner has waited 90 s", "rollouter has waited 95 s for logprobs from learner"],
    ),
    "a role waits for itself": (
        [waits("controller", ("its own call", "controller", 50))],
        {},
        [],
        ["deadlock: controller waits for itself"],
        ["Controller has waited 50 s for its own call from controller"],
    ),
    "nothing is in flight, and nothing comes": (
        [CONTROLLER, LEARNER, RoleReport(name="rollouter")],
        {"rows": 0.0},
        [],
        ["no group is in flight and none is issued: nothing can become ready"],
        ["learner has waited 312 s for 3 of 8 groups; no group is in flight"],
    ),
    "groups were issued, and nobody generates them": (
        [LEARNER, RoleReport(name="rollouter")],
        IN_FLIGHT,
        [group("p-3", 400.0, holder=None)],
        ["no role generates p-3, which was issued 400 s ago"],
        ["1 are not settled; the oldest, p-3"],
    ),
    "a full queue that nobody leases from": (
        [waits("rollouter", ("room for group p-5", "queue", 60)), RoleReport(name="learner", stack=IDLE)],
        {"waiting/put": 2.0, "rows": 64.0},
        [],
        ["the queue is full (64 rows), and no role leases from it"],
        ["Rollouter has waited 60 s for room for group p-5"],
    ),
    "a full queue whose consumer wants other groups": (
        [LEARNER, waits("rollouter", ("room for group p-17", "queue", 300))],
        {"waiting/put": 1.0, "rows": 64.0},
        GROUPS,
        ["deadlock: learner waits for rollouter, rollouter waits for learner"],
        ["the queue is full (64 rows), and learner, which should lease groups, has none"],
    ),
    "a full queue whose groups a busy consumer has leased": (
        [
            waits("rollouter", ("room for group p-5", "queue", 60)),
            RoleReport(name="learner", leases=("p-1", "p-2"), stack=LOADS),
        ],
        {"waiting/put": 2.0, "rows": 64.0},
        [],
        ["learner answers, waits for no other role, and is in read (data.py:33), called by next_rows (data.py:20)"],
        ["learner has leased 2 of its groups"],
    ),
    "a rank has not reached a collective": (
        [CONTROLLER, RoleReport(name="learner[0]", stack=REDUCES), RoleReport(name="learner[1]", stack=LOADS)],
        {},
        [],
        [
            "learner[0] waits in a collective, all_reduce (distributed_c10d.py:2501), called by train_step "
            "(step.py:10), which not all ranks have reached: learner[1] is in read (data.py:33), called by "
            "next_rows (data.py:20)"
        ],
        ["Controller has waited 312 s for step 4 from learner[0]"],
    ),
    "ranks wait in different collectives": (
        [RoleReport(name="learner[0]", stack=REDUCES), RoleReport(name="learner[1]", stack=GATHERS)],
        {},
        [],
        [
            "deadlock: the ranks of learner wait in different collectives: learner[0] in all_reduce "
            "(distributed_c10d.py:2501), called by train_step (step.py:10); learner[1] in all_gather "
            "(distributed_c10d.py:3100), called by export (export.py:4)"
        ],
        [],
    ),
    "one rank of several does not answer": (
        [CONTROLLER, RoleReport(name="learner[0]", stack=REDUCES), RoleReport(name="learner[1]", is_answering=False)],
        {},
        [],
        ["learner[1] does not answer (for 0 s)"],
        ["step 4 from learner[1]"],
    ),
    "a weight update waits for a request whose reward waits for the paused engine": (
        [
            waits("controller", ("weight update 5 to be taken", "rollouter", 200)),
            waits("rollouter", ("request r-7 to end (drain)", "engine 0", 200)),
            waits("engine 0", ("the session of r-7", "judge", 210)),
            waits("judge", ("a judgement", "engine 0", 205)),
        ],
        {},
        [],
        ["deadlock: engine 0 waits for judge, judge waits for engine 0"],
        ["rollouter has waited 200 s for request r-7 to end (drain) from engine 0"],
    ),
    "a weight update waits for a request that never ends": (
        [
            waits("controller", ("weight update 5 to be taken", "rollouter", 200)),
            waits("rollouter", ("request r-7 to end (drain)", "engine 0", 200)),
            RoleReport(name="engine 0", stack=inside(("/e/core.py", 5, "generate"))),
        ],
        {},
        [],
        ["engine 0 answers, waits for no other role, and is in generate (core.py:5)"],
        ["request r-7 to end (drain) from engine 0"],
    ),
    "the queue does not answer": (
        [waits("rollouter", ("room for group p-5", "queue", 60))],
        {},
        [],
        ["the queue does not answer"],
        [],
    ),
    "groups wait for a teacher's columns": (
        [LEARNER, waits("teacher", ("scores of p-8", "teacher engine", 300))],
        {"groups/settled": 1.0},
        [group("p-8", 320.0, state="settled", missing=(), holder="teacher")],
        ["teacher engine has not answered teacher for 300 s"],
        ["all are settled; p-8 is held by teacher"],
    ),
    "groups are settled, and nobody wants them": (
        [LEARNER],
        {"groups/settled": 2.0},
        [
            group("p-8", state="settled", missing=(), holder=None),
            group("p-9", state="settled", missing=(), holder=None),
        ],
        ["2 groups are settled and no role holds them: they lack columns, or learner does not lease them"],
        [],
    ),
    "the learner computes for too long": (
        [CONTROLLER, RoleReport(name="learner", stack=LOADS)],
        {},
        [],
        ["learner answers, waits for no other role, and is in read (data.py:33), called by next_rows (data.py:20)"],
        ["step 4 from learner"],
    ),
    "all are idle, and none knows why": (
        [RoleReport(name="controller"), RoleReport(name="learner", stack=IDLE)],
        {},
        [],
        ["no role has a known wait, and all answer: see their stacks"],
        [],
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_verdict_names_the_end_of_the_waits(name):
    roles, stats, groups, causes, words = SITUATIONS[name]
    text, found = judge_hang(roles, stats, groups)
    assert list(found) == causes
    for word in [*words, *(cause[1:] for cause in causes)]:
        assert word in text, f"the verdict lacks {word!r}: {text}"


def test_what_leads_into_a_story_that_was_told_is_not_told_again():
    reward = waits("rollouter", ("a score", "reward", 100))
    text, causes = judge_hang(
        [waits("learner", ("groups", "rollouter", 90)), waits("teacher", ("rows", "rollouter", 80)), reward], {}, []
    )
    assert causes == ("reward has not answered rollouter for 100 s",)
    assert "teacher" not in text


def test_many_stories_are_bounded_and_many_names_do_not_slow_it():
    roles = [waits(f"worker {number}", ("x", f"outside {number}", 1.0)) for number in range(2000)]
    assert len(judge_hang(roles, {}, [])[1]) == 5


def test_places_are_read_from_both_kinds_of_stacks():
    assert place_of(REDUCES) == "all_reduce (distributed_c10d.py:2501), called by train_step (step.py:10)"
    assert (
        place_of(dumped(("/y/a.py", 1, "outer"), ("/y/a.py", 2, "inner"))) == "inner (a.py:2), called by outer (a.py:1)"
    )
    assert place_of(dumped(("/y/a.py", 1, "outer")), depth=1) == "outer (a.py:1)"
    assert [place_of(text) for text in (IDLE, "", "learner[0] is dead: killed")] == ["", "", ""]
    fetches = '  File "/y/b.py", line 8, in fetch\n  waits for a Future\n'
    task = f"{IDLE}task Task-3 (most recent call last):\n{SERVED}{fetches}"
    assert place_of(task) == "fetch (b.py:8)"
    assert [is_in_collective(text) for text in (REDUCES, LOADS, IDLE)] == [True, False, False]


def test_a_stack_is_shortened_to_its_innermost_frames():
    stack = 'thread main:\n  File "/a/loop.py", line 3 in run\n    go()\n  File "/a/socket.py", line 12 in recv\n'
    assert innermost_frames(stack) == ["recv (socket.py:12)", "run (loop.py:3)"]
    assert innermost_frames("most recent call first\n" + stack) == ["run (loop.py:3)", "recv (socket.py:12)"]
    assert innermost_frames(stack.partition("\n")[2], depth=1) == ["recv (socket.py:12)"]
    assert innermost_frames("") == []


def report(**changes: Any) -> HangReport:
    fields = {"at": "2030-01-01T00:00:00+00:00", "run": "runs/x", "no_progress_s": 1800.0, "verdict": "why"}
    return HangReport(**(fields | changes))


def test_a_report_is_read_as_it_was_written(tmp_path):
    roles = (
        waits("rollouter", ("a score", "reward judge", 3.5), stack="a\nb", leases=("p-1",), counts={"running": 4.0}),
        RoleReport(name="engine 1", state="dead", is_answering=False, since_s=2.0),
    )
    written = report(
        roles=roles, queue={"rows": 3.0}, groups=(group("p-1"),), causes=("a", "b"), last_progress="step 3"
    )
    write_hang_report(tmp_path / HANG_FILE, written)
    assert read_hang_report(tmp_path / HANG_FILE) == written
    assert json.loads((tmp_path / HANG_FILE).read_text())["roles"][0]["waits"][0]["on"] == "reward judge"


@pytest.mark.one_python("it cuts 40 MB of text")
def test_sizes_are_bounded_and_what_json_lacks_is_left_out(tmp_path):
    roles = tuple(
        waits(
            f"engine {number}",
            *(("x" * 10_000, "y", float(age)) for age in range(1000)),
            stack="s" * 1_000_000,
            leases=("p",) * 1000,
            counts={"nan": math.nan, "running": 1.0},
            since_s=math.inf,
        )
        for number in range(40)
    )
    groups = tuple(group(f"p-{age}", float(age), missing=tuple(range(5000))) for age in range(10_000))
    write_hang_report(
        tmp_path / HANG_FILE, report(roles=roles, groups=groups, verdict="v\ud800" * 100_000, queue={"a": math.inf})
    )
    found = read_hang_report(tmp_path / HANG_FILE)
    assert [one.uid for one in found.groups] == [f"p-{age}" for age in range(9999, 9999 - MAX_GROUPS, -1)]
    assert all(len(role.stack) <= MAX_STACK for role in found.roles)
    assert found.roles[0].waits[0].since_s == 999.0
    assert (dict(found.roles[0].counts), found.roles[0].since_s, dict(found.queue)) == ({"running": 1.0}, 0.0, {})
    assert "characters omitted" in found.roles[0].stack
    assert r"v\ud800" in found.verdict
    assert (tmp_path / HANG_FILE).stat().st_size < MAX_FILE_BYTES


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"format": "rl-hang-1"}', "Object missing required field `at`"),
        (b"\xff\xfe", "JSON is malformed"),
        (b'{"at": "\xff", "run": "y", "no_progress_s": 1}', "utf-8"),
        (b'{"at": "x", "run": "y", "no_progress_s": 1, "format": "rl-hang-9"}', "Invalid enum value 'rl-hang-9'"),
        (b'{"at": "x", "run": "y", "no_progress_s": "long"}', "Expected `float`, got `str` - at `$.no_progress_s`"),
        (b'{"at": "x", "run": "y", "no_progress_s": 1e999}', "Number out of range"),
        (b'{"at": "x", "run": "y", "no_progress_s": 1, "roles": [{}]}', "required field `name` - at `$.roles[0]`"),
        (b'{"at": "x", "run": "y", "no_progress_s": 1, "verdict": ' + b"[" * 100_000, "Expected `str`, got `array`"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, words):
    (tmp_path / HANG_FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"hang\.json must be a hang report") as caught:
        read_hang_report(tmp_path / HANG_FILE)
    assert words in str(caught.value)


def test_missing_and_huge_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"hang\.json does not exist"):
        read_hang_report(tmp_path / HANG_FILE)
    with (tmp_path / HANG_FILE).open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(DataError, match="at most"):
        read_hang_report(tmp_path / HANG_FILE)
