"""The queue's state machine, called directly: after each call, what it counts equals a recount of its groups."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from rl_core import QueueOptions, TaskSpec
from rl_core.errors import AlreadySettledError, DataError, NotReadyError, OutdatedLeaseError
from rl_core.queue.capacity import Capacity
from rl_core.queue.core import QueueCore
from rl_core.queue.group import QueuedGroup
from rl_core.queue.interface import LedgerEntry
from rl_core.queue.messages import GENERATE, Ack, Finish, LeaseRequest, PartInfo, Put, Reserve
from rl_core.queue.picking import Blocked, describe_named, finished_groups, listed
from rl_core.queue.segment_table import SegmentTable

SPARE = 3
TASKS = [
    TaskSpec(name="reference", needs=frozenset(), gives=frozenset({"values"})),
    TaskSpec(name="train", needs=frozenset({"input_ids", "reward", "values"}), order="issue", max_staleness=1),
    TaskSpec(name="log", needs=frozenset({"reward"}), max_staleness=2),
]
CLAIMS = TaskSpec(name=GENERATE, needs=frozenset(), order="issue")
SPECS = {spec.name: spec for spec in (*TASKS, CLAIMS)}
COLUMNS = ["input_ids", "reward"]


@pytest.fixture(autouse=True)
def _small_heaps(monkeypatch):
    """Remove outdated entries of heaps early."""
    for module in ("index", "core"):
        monkeypatch.setattr(f"rl_core.queue.{module}.SPARE_ENTRIES", SPARE)


def request(task, groups=1, *, allow_fewer=False, prompts=(), lease_s=10.0):
    return LeaseRequest(task, groups, lease_s, 0.0, allow_fewer, list(prompts))


def put(core, sessions, *, rows=1, size=100, versions=(-1, -1), columns=COLUMNS, place="place"):
    """Put the same number of rows for each prompt."""
    parts = [
        PartInfo(uid, index * rows, rows, 7 * rows, size, *versions) for index, (uid, _) in enumerate(sessions) if rows
    ]
    message = Put(sessions, parts, columns, place, f"put of {sessions}", 0, 0.0)
    core.check_sessions(sessions)
    core.put(message)


def lease(core, task, groups=1, *, now=0.0, client="client", **asked):
    return core.try_lease(request(task, groups, **asked), now=now, client=client, blocked=Blocked())


def ack(core, held, *, size=0):
    core.ack(Ack(held.lease_id, held.task.name, sorted(held.task.gives), size, f"ack {held.lease_id}"))


def core_with(num_prompts, *, num_sessions=1, tasks=TASKS):
    core = QueueCore(tasks, QueueOptions())
    core.issue([(f"p{i}", None) for i in range(num_prompts)], num_sessions=num_sessions, now=0.0)
    return core


# -- the recount


def is_possible(group, task):
    return group.state == "issued" if task == GENERATE else group.is_open and task not in group.acked


def is_ready(group, task):
    is_there = task == GENERATE or (group.state == "settled" and SPECS[task].needs <= group.columns)
    return is_possible(group, task) and is_there and task not in group.leased


def in_order(core, task):
    """Return the groups that the task may lease next; in issue order, one that is not ready blocks the others."""
    if SPECS[task].order == "issue":
        return [group for group in core.groups if is_possible(group, task) and task not in group.leased]
    return sorted((group for group in core.groups if is_ready(group, task)), key=lambda group: group.arrival)


def is_stale(core, group, task):
    bound = SPECS[task].max_staleness
    return bound is not None and group.oldest >= 0 and core.policy_version > group.oldest + bound


def expected_next(core, asked):
    """Return the uids that a lease must get, None if it must wait, and the uids that it drops as too stale."""
    num_ready = sum(is_ready(group, asked.task) for group in core.groups)
    num_possible = sum(is_possible(group, asked.task) for group in core.groups)
    wanted = 1 if asked.task == GENERATE or (asked.allow_fewer and num_ready == num_possible) else asked.groups
    picked, stale = [], []
    if num_ready < wanted:
        return None, stale
    for group in in_order(core, asked.task):
        if len(picked) == asked.groups or not is_ready(group, asked.task):
            break
        (stale if is_stale(core, group, asked.task) else picked).append(group.uid)
    is_all = asked.task == GENERATE or (asked.allow_fewer and len(picked) == num_possible - len(stale))
    return (picked if picked and (is_all or len(picked) == asked.groups) else None), stale


def snapshot(core):
    """Return what the journal keeps of each group."""
    return {
        g.uid: (g.state, g.attempt, g.reason, dict(g.settled), dict(g.failures), dict(g.acked), [*g.parts], [*g.late])
        for g in core.groups
    }


def assert_counts_are_right(core):
    groups = list(core.groups)
    assert [group.order for group in groups] == sorted(group.order for group in groups)
    expected = Counter()
    for group in groups:
        assert group.num_rows == sum(part.num_rows for part in group.parts)
        assert group.num_tokens == sum(part.num_tokens for part in group.parts)
        assert group.size_bytes == sum(part.size_bytes for part in (*group.parts, *group.late))
        assert group.oldest == min((part.oldest for part in group.parts if part.oldest >= 0), default=-1)
        assert group.newest == max((part.newest for part in group.parts), default=-1)
        common = set.intersection(*(set(part.columns) for part in group.parts)) if group.parts else set()
        if group.state != "issued":
            assert group.columns == common.union(*(part.columns for part in group.late))
        more = {"groups": 1, "rows": group.num_rows, "size_bytes": group.size_bytes}
        expected.update({f"{name}/{group.state}": number for name, number in more.items() if number})
        assert (entry := group.entry()) == LedgerEntry(
            prompt_uid=group.uid,
            state=group.state,
            sessions_settled=len({*group.settled, *group.failures}),
            sessions_failed=group.failures,
            acked_by=frozenset(group.acked),
            reason=group.reason,
            attempt=group.attempt,
            num_rows=group.num_rows,
            num_tokens=group.num_tokens,
            policy_versions=None if group.oldest < 0 else (group.oldest, group.newest),
        )
        assert entry.sessions_settled + len(group.missing_sessions) == group.num_sessions
    assert core.groups.counts() == expected
    assert list(core.groups.counts()) == sorted(expected), "groups, rows and bytes, each in the order of the states"
    assert core.groups.num_rows == sum(group.num_rows for group in groups)
    assert core.groups.size_bytes == sum(group.size_bytes for group in groups)
    assert {*core.groups.issued.values()} == {group for group in groups if group.state == "issued"}
    for task in (*core.groups.tasks.values(), core.groups.task_of(request(GENERATE))):
        assert task.num_ready == sum(is_ready(group, task.name) for group in groups)
        assert task.num_possible == sum(is_possible(group, task.name) for group in groups)
        assert all(task.is_ready(group) == is_ready(group, task.name) for group in groups)
    needed = Counter(number for group in groups for number in group.segments())
    assert {number: core.segments._segments[number].needed_by for number in core.segments} == {
        number: needed[number] for number in {*needed, *core.segments.pins()}
    }
    assert sorted([*core.segments, *(number for number, _ in core.segments.freed)]) == core.segments.added
    held = {(group.uid, task): number for group in groups for task, number in group.leased.items()}
    assert held == {
        (group.uid, running.task.name): number for number, running in core.leases.items() for group in running.groups
    }
    assert core.next_expiry() <= min((running.expires_at for running in core.leases.values()), default=float("inf"))


class Walk:
    """Random calls of one queue; `waiting` is a lease of named prompts that is tried again after every call."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.core = QueueCore(TASKS, QueueOptions())
        self.now, self.num_issued, self.num_places = 0.0, 0, 0
        self.waiting, self.blocked = None, Blocked()

    def some(self, items, most=3):
        items = list(items)
        return self.draw.sample(items, self.draw.randint(1, min(most, len(items)))) if items else []

    def new_place(self):
        self.num_places += 1
        return self.num_places

    def issue(self):
        prompts = [(f"p{self.num_issued + i}", None) for i in range(self.draw.randint(1, 3))]
        self.num_issued += len(prompts)
        self.core.issue(prompts, num_sessions=self.draw.randint(1, 2), now=self.now)

    def put(self):
        groups = self.some(self.core.groups.issued.values())
        sessions = [(group.uid, self.some(group.missing_sessions)) for group in groups]
        parts = [
            PartInfo(uid, self.draw.randint(0, 3), 1, 5, self.draw.randint(0, 90), *versions)
            for uid, _ in sessions
            for versions in self.draw.choices([(-1, -1), (0, 0), (2, 3), (self.core.policy_version,) * 2], k=2)
            if self.draw.random() < 0.7
        ]
        columns = self.draw.choice([COLUMNS, COLUMNS, [*COLUMNS, "values"], ["input_ids"]])
        self.core.check_sessions(sessions)
        self.core.put(Put(sessions, parts, columns, self.new_place(), "put", 0, 0.0))

    def fail(self):
        for group in self.some(self.core.groups.issued.values(), 1):
            self.core.fail(group.uid, self.draw.choice(group.missing_sessions), "failed")

    def drop(self):
        for group in self.some((group for group in self.core.groups if group.is_open), 1):
            before, arrival = group.attempt, group.arrival
            is_reissued = self.draw.random() < 0.5
            self.core.drop(group, "why: it was", reissue=is_reissued, now=self.now)
            assert (group.attempt, group.state) == ((before + 1, "issued") if is_reissued else (before, "dropped"))
            assert (group.arrival, group.num_rows, group.leased) == (arrival, 0, {})
            assert not is_reissued or (group.issued_at == self.now and "reference" not in group.acked)

    def lease_next(self):
        task = self.draw.choice([*SPECS, "train"])
        asked = request(task, self.draw.randint(1, 3), allow_fewer=self.draw.random() < 0.5)
        expected, stale = expected_next(self.core, asked)
        num_stale = self.core.drops["stale"]
        found = self.core.try_lease(asked, now=self.now, client=self.draw.choice("ab"), blocked=Blocked())
        assert self.core.drops["stale"] - num_stale == len(stale)
        assert (found and [group.uid for group in found.groups]) == expected
        assert [self.core.groups.get(uid).reason for uid in stale] == ["stale"] * len(stale)

    def lease_named(self):
        groups = self.some(group for group in self.core.groups if is_possible(group, "log"))
        self.waiting = request("log", prompts=[group.uid for group in groups]) if groups else None
        self.blocked = Blocked()

    def ack(self):
        for held in self.some((held for held in self.core.leases.values() if held.task.name != GENERATE), 1):
            sizes, rows = [len(group.late) for group in held.groups], [group.num_rows for group in held.groups]
            ack(self.core, held, size=10 * sum(rows) + 1)
            for index, group in enumerate(held.groups):
                if group.is_open and held.task.gives:
                    (part,) = group.late[sizes[index] :]
                    assert (part.first, part.num_rows) == (sum(rows[:index]), rows[index])
                    assert part.size_bytes == (10 * sum(rows) + 1) * rows[index] // sum(rows)

    def finish(self):
        task = self.draw.choice(["train", "log"])
        uids = [group.uid for group in self.some(group for group in self.core.groups if is_ready(group, task))]
        self.core.finish(Finish(task, uids, -self.num_issued))
        assert all(task in self.core.groups.get(uid).acked for uid in uids)

    def end(self):
        for lease_id in self.some(self.core.leases, 1):
            self.core.end_lease(lease_id, "was released")

    def extend(self):
        for held in self.some(self.core.leases.values(), 1):
            self.core.extend(held, expires_at=self.now + self.draw.choice([1.0, 30.0]))

    def expire(self):
        self.now += self.draw.choice([0.0, 1.0, 5.0])
        due = {number for number, held in self.core.leases.items() if held.expires_at <= self.now}
        assert {*self.core.expire(now=self.now)} == due

    def lose(self):
        for number in self.some(self.core.segments, 1):
            before = {g.uid: ([*g.parts], [*g.late], g.attempt, {*g.acked}) for g in self.core.groups}
            count = self.core.lost(number, "torn", now=self.now)
            hit = [uid for uid, (parts, late, *_) in before.items() if number in {p.segment for p in (*parts, *late)}]
            assert count == len(hit)
            for uid in hit:
                parts, late, attempt, acked = before[uid]
                group = self.core.groups.get(uid)
                if any(part.segment == number for part in parts):
                    assert (group.attempt, group.state, group.reason) == (attempt + 1, "issued", "lost: torn")
                else:
                    assert group.late == [part for part in late if part.segment != number]
                    assert {*group.acked} == acked - {part.task for part in late if part.segment == number}

    def leave(self):
        client = self.draw.choice("ab")
        for number in self.some(self.core.segments, 2):
            self.core.segments.pin(number, "ab"[self.draw.random() < 0.5])
        self.core.drop_client(client)
        assert all(held.client != client for held in self.core.leases.values())
        assert all(client not in pins for pins in self.core.segments.pins().values())

    def publish(self):
        self.core.policy_version += 1

    def forget(self):
        finished = [group for group in self.core.groups if not group.is_open]
        assert self.core.forget_finished() == len(finished)
        assert {*self.core.forgotten[len(self.core.forgotten) - len(finished) :]} == {group.order for group in finished}
        assert not any(group.uid in self.core.dirty for group in finished)

    def retry(self):
        """Lease the named prompts; a queue that remembers what blocks them decides as one that looks at all."""
        if self.waiting is None:
            return
        groups = [self.core.groups.get(uid) for uid in self.waiting.prompts]
        is_over = any(group is None or not is_possible(group, "log") for group in groups)
        ready = [] if is_over else [is_ready(group, "log") for group in groups]
        stale = [] if is_over else [is_ready(group, "log") and is_stale(self.core, group, "log") for group in groups]
        try:
            found = self.core.try_lease(self.waiting, now=self.now, client="a", blocked=self.blocked)
        except DataError:
            assert is_over or any(stale)
            self.waiting = None
            return
        assert not is_over
        assert (found is not None) == all(ready)
        if found is not None:
            assert found.groups == groups
            assert not any(stale)
            self.waiting = None

    def restored(self):
        """Return a queue with what the journal keeps of this one's groups and segments, and its pins."""
        core, names = QueueCore(TASKS, QueueOptions()), ("uid", "order", "num_sessions", "prompt", "issued_at")
        names += ("attempt", "state", "reason", "settled", "failures", "acked")
        groups = []
        for old in self.core.groups:
            groups.append(QueuedGroup(**{name: getattr(old, name) for name in names}))
            for part in old.parts:
                groups[-1].add_part(part)
            for part in old.late:
                groups[-1].add_late(part)
        places = {number: f"place {number}" for number in self.core.segments.added}
        core.restore(groups, places, self.core.segments.pins())
        settled = [group.arrival for group in groups if group.state == "settled"]
        assert settled == list(range(len(settled)))
        kept = [*self.core.segments]
        assert ([*core.segments], core.segments.pins()) == (kept, self.core.segments.pins())
        gone = [number for number in places if number not in kept]
        assert core.segments.freed == [(number, f"place {number}") for number in gone]
        assert all(core.segments.place(number) == f"place {number}" for number in kept)
        core.segments.added = [*places]
        core.issue([("next", None)], num_sessions=1, now=0.0)
        assert core.groups.get("next").order == max((old.order for old in groups), default=-1) + 1
        assert core.segments.add("new") == max(places, default=0) + 1
        core.segments.need(max(places, default=0) + 1)
        core.segments.release(max(places, default=0) + 1)
        for task in core.groups._every:
            assert task.peek() is next(iter(in_order(core, task.name)), None)
        return core

    def step(self):
        calls = [self.issue, self.put, self.put, self.put, self.fail, self.drop, self.lease_next, self.lease_next]
        calls += [self.lease_named, self.ack, self.ack, self.finish, self.end, self.extend, self.expire, self.lose]
        call = self.draw.choice([*calls, self.lease_next, self.leave, self.publish, self.forget])
        self.core.dirty.clear()
        before, num_changes = snapshot(self.core), self.core.num_changes
        possible = {(task, uid) for task in SPECS for uid in before if is_possible(self.core.groups.get(uid), task)}
        left = {task.name: task.num_left for task in self.core.groups._every}
        call()
        self.retry()
        after = snapshot(self.core)
        assert self.core.dirty.keys() >= {uid for uid in after if before.get(uid) != after[uid]}
        assert (self.core.num_changes > num_changes) == any(before.get(uid, after[uid]) != after[uid] for uid in after)
        for task in self.core.groups._every:
            gone = sum(
                name == task.name and uid in after and not is_possible(self.core.groups.get(uid), name)
                for name, uid in possible
            )
            assert task.num_left - left[task.name] == gone
            if self.draw.random() < 0.3:
                assert task.peek() is next(iter(in_order(self.core, task.name)), None)
        assert_counts_are_right(self.core)


@pytest.mark.parametrize("seed", range(10))
def test_after_every_call_the_counts_equal_a_recount(seed):
    walk = Walk(seed)
    for _ in range(150):
        walk.step()
    assert_counts_are_right(walk.restored())


# -- refusals, which change nothing


def test_prompts_are_issued_all_or_none_with_an_allowed_number_of_sessions():
    core = core_with(1)
    for names, num_sessions, message in (
        (["a", "b"], 0, "from 1 to 4096; found 0"),
        (["a", "b"], 4097, "from 1 to 4096; found 4097"),
        (["a", "a"], 1, "'a' was already issued"),
        (["a", "p0"], 1, "'p0' was already issued"),
    ):
        with pytest.raises(DataError, match=message):
            core.issue([(name, None) for name in names], num_sessions=num_sessions, now=0.0)
    assert [group.uid for group in core.groups] == ["p0"]
    core.issue([("a", None)], num_sessions=4096, now=0.0)
    core.issue([("b", None)], num_sessions=1, now=0.0)


@pytest.mark.parametrize(
    ("sessions", "error", "message"),
    [
        ([("p0", [2]), ("p0", [1])], DataError, "name each prompt once"),
        ([("p0", [])], DataError, r"'p0' once; found \[\]"),
        ([("p1", [0]), ("p0", [2, 2])], DataError, r"'p0' once; found \[2, 2\]"),
        ([("p0", [3])], DataError, "sessions 0 to 2; found session 3"),
        ([("p0", [2, -1])], DataError, "sessions 0 to 2; found session -1"),
        ([("p1", [0]), ("p0", [2, 0])], AlreadySettledError, "session 0 of prompt 'p0' is already settled. Put"),
        ([("p0", [1])], AlreadySettledError, r"session 1 of prompt 'p0' is already settled \(broken\)"),
        ([("p2", [0])], DataError, "'p2' was never issued"),
    ],
)
def test_sessions_that_cannot_be_settled_are_refused(sessions, error, message):
    core = core_with(2, num_sessions=3)
    put(core, [("p0", [0])])
    core.fail("p0", 1, "broken")
    with pytest.raises(error, match=message):
        core.check_sessions(sessions)
    core.check_sessions([("p0", [2]), ("p1", [0, 2])])


@pytest.mark.parametrize(("uid", "first", "num_rows"), [("p1", 0, 1), ("p0", -1, 1), ("p0", 0, 0)])
def test_a_put_with_rows_of_no_session_settles_nothing(uid, first, num_rows):
    core = core_with(2)
    with pytest.raises(DataError, match=f"rows of prompt '{uid}' but settles no session"):
        core.put(Put([("p0", [0])], [PartInfo(uid, first, num_rows, 1, 1)], COLUMNS, "place", "put", 0, 0.0))
    assert (list(core.segments), core.groups.counts()) == ([], {"groups/issued": 2})


def test_a_put_is_known_by_its_name_once_all_its_sessions_have_it():
    core = core_with(2, num_sessions=2)
    sessions = [("p0", [0, 1]), ("p1", [1])]
    assert not core.was_put(f"put of {sessions}", sessions)
    put(core, sessions)
    assert core.was_put(f"put of {sessions}", sessions)
    assert core.was_put(f"put of {sessions}", sessions[1:])
    assert not core.was_put("another put", sessions)
    assert not core.was_put(f"put of {sessions}", [("p1", [0, 1])])
    assert not core.was_put(f"put of {sessions}", [*sessions, ("p2", [0])])


def test_a_lease_that_ended_is_refused_with_what_became_of_it():
    core = core_with(4)
    claim = lease(core, GENERATE)
    put(core, [(f"p{i}", [0]) for i in range(4)])
    acked, released, expired = (lease(core, "reference", now=float(i)) for i in range(3))
    with pytest.raises(DataError, match=r"exactly the columns \['values'\]; found \[\]"):
        core.ack(Ack(acked.lease_id, "reference", [], 0, None))
    ack(core, acked)
    core.end_lease(released.lease_id, "was released")
    assert core.expire(now=11.9) == []
    assert core.expire(now=12.0) == [expired.lease_id]
    for number, message in (
        (acked.lease_id, "it was acked. No action is needed."),
        (released.lease_id, "it was released. Its groups are delivered again"),
        (expired.lease_id, "it expired. Its groups are delivered again"),
        (claim.lease_id, "it was fulfilled. Its groups are delivered again"),
        (99, "it expired, was released or was acked. Its groups"),
    ):
        with pytest.raises(OutdatedLeaseError, match=f"lease {number} of task 'reference' is outdated: {message}"):
            core.current(number, "reference")
    core.first_lease = 98
    with pytest.raises(OutdatedLeaseError, match="the queue was reopened since"):
        core.current(97, "reference")
    with pytest.raises(OutdatedLeaseError, match="it expired, was released or was acked"):
        core.current(98, "reference")
    assert (core.was_acked(acked.lease_id), core.was_acked(released.lease_id), core.was_acked(99)) == (1, 0, 0)
    core.ended.clear()
    assert core.was_acked(acked.lease_id), "the group keeps it"


def test_counts_of_events():
    core = core_with(4)
    put(core, [(f"p{i}", [0]) for i in range(3)])
    core.fail("p3", 0, "b")
    ack(core, lease(core, "reference", groups=2))
    core.finish(Finish("log", ["p0", "p1", "p2"], -1))
    lease(core, "reference")
    core.expire(now=100.0)
    core.drop(core.groups.find_open("p2"), "lost: torn", reissue=True, now=1.0)
    assert core.counts == {"acks/reference": 2, "acks/log": 3, "leases_expired": 1, "reissued": 1}
    assert core.drops == {"no rows": 1, "lost": 1}
    assert [core.groups.get(uid).reason for uid in ("p2", "p3")] == ["lost: torn", "no rows: b"]


def test_numbers_go_on_after_those_of_a_state_that_was_discarded():
    old, new = core_with(2), core_with(2)
    put(old, [("p0", [0]), ("p1", [0])])
    first, put_before = lease(old, "log").lease_id, list(old.segments)
    new.number_after(old)
    put(new, [("p0", [0])])
    assert lease(new, "log").lease_id == first + 1
    assert min(new.segments) == max(put_before) + 1


def test_of_two_late_columns_the_one_that_is_lost_is_given_again():
    tasks = [TaskSpec(name=name, needs=frozenset(), gives=frozenset({name})) for name in ("values", "returns")]
    core = core_with(1, tasks=tasks + TASKS[2:])
    put(core, [("p0", [0])])
    group = core.groups.find_open("p0")
    for name in ("values", "returns"):
        ack(core, lease(core, name))
    first, second = group.late
    assert core.lost(second.segment, "torn", now=0.0) == 1
    assert (group.late, list(group.acked), group.columns) == ([first], ["values"], {*COLUMNS, "values"})
    assert second.segment not in core.segments
    assert lease(core, "values") is None
    assert lease(core, "returns").groups == [group]


def test_a_prompt_that_was_issued_again_is_leased_once():
    core = core_with(3)
    put(core, [("p0", [0])])
    put(core, [("p1", [0])])
    core.drop(core.groups.find_open("p0"), "why", reissue=True, now=0.0)
    put(core, [("p0", [0])])
    assert [group.uid for group in lease(core, "log").groups] == ["p1"], "p0 arrived again, later"
    for _ in range(2):
        ack(core, lease(core, "reference"))
    put(core, [("p2", [0])])
    assert [group.uid for group in lease(core, "log", groups=2).groups] == ["p0", "p2"]


# -- memory


def test_entries_of_what_is_gone_are_removed_from_heaps():
    core = core_with(1, num_sessions=2)  # p0 is never ready, so that nothing after it is reached
    lengths = []
    for number in range(40):
        core.issue([(f"q{number}", None)], num_sessions=2, now=0.0)
        core.drop(core.groups.find_open(f"q{number}"), "why", reissue=False, now=0.0)
        lengths.append(len(core.groups.tasks["train"]._heap))
    assert max(lengths) == 2 * 2 + SPARE, "two groups are possible when an entry is added"
    assert core.groups.tasks["log"]._heap == [], "in order of arrival, only what is ready is there"
    held = lease(core, GENERATE)
    lengths = []
    for number in range(40):
        core.extend(held, expires_at=10.0 + number)
        lengths.append(len(core._expiries))
    assert max(lengths) == 2 + SPARE
    assert core.expire(now=48.5) == []
    assert (core.next_expiry(), core.expire(now=49.0), core.next_expiry()) == (49.0, [held.lease_id], float("inf"))


def test_the_ends_of_ten_thousand_leases_are_remembered():
    core = core_with(1)
    for number in range(10_002):
        core._note_end(number, "was released")
    assert list(core.ended) == list(range(2, 10_002))


# -- leases of named prompts


def test_what_blocks_a_lease_is_not_looked_for_again_until_it_may_have_changed(monkeypatch):
    core, blocked = core_with(3), Blocked()
    task, asked = core.groups.tasks["log"], request("log", prompts=["p0", "p1"])
    assert not blocked.is_still(task, policy_version=0)
    put(core, [("p1", [0])])
    for change in (
        lambda: None,
        lambda: core.drop(core.groups.find_open("p2"), "why", reissue=False, now=0.0),
        lambda: setattr(core, "policy_version", 1),
        lambda: put(core, [("p0", [0])]),
    ):
        change()
        assert core.groups.get("p0").state == "settled" or not blocked.is_still(
            task, policy_version=core.policy_version
        )
        found = core.try_lease(asked, now=0.0, client="a", blocked=blocked)
        if found is None:
            assert blocked.is_still(task, policy_version=core.policy_version)
            assert not blocked.is_still(core.groups.tasks["train"], policy_version=core.policy_version)
    assert [group.uid for group in found.groups] == ["p0", "p1"]


def test_prompts_that_cannot_be_leased_or_finished_are_named_with_the_reason():
    core = core_with(5, num_sessions=2)
    put(core, [(f"p{i}", [0, 1]) for i in range(3)])
    put(core, [("p3", [1])])
    held = lease(core, "log", prompts=["p1"])
    asked = request("log", prompts=["p0", "p1", "p3"])
    lacking = rf"'p1' is leased by a consumer of this task \(lease {held.lease_id}\), 'p3' lacks 1 of 2 sessions"
    assert describe_named(core.groups, asked) == f"2 not ready: {lacking}".replace("\\", "")
    assert describe_named(core.groups, request("train", prompts=["p2"])) == "1 not ready: 'p2' lacks columns ['values']"
    core.finish(Finish("log", ["p2"], -1))
    for task, prompts, message in (
        ("log", ["p0", "p1", "p3"], f"'log' cannot finish 2 of 3 prompts: {lacking}. Nothing"),
        ("log", ["p0", "p2"], "1 of 2 prompts were already acked by task 'log': 'p2'. Nothing"),
        ("log", ["p0", "p0"], "named once; found 'p0' more than once"),
        ("reference", ["p0"], r"adds \['values'\], so it must ack a lease"),
        ("log", ["p9"], "'p9' was never issued"),
    ):
        with pytest.raises(DataError, match=message):
            finished_groups(core.groups, Finish(task, prompts, -2))
    with pytest.raises(DataError, match="'p2' was already acked by task 'log'"):
        lease(core, "log", prompts=["p0", "p2"])
    put(core, [("p4", [0, 1])], versions=(0, 0))
    core.policy_version = 3
    with pytest.raises(DataError, match=r"1 of 2 prompts exceed max_staleness = 2 of task 'log' and .* dropped: 'p4'"):
        lease(core, "log", prompts=["p0", "p4"])


def test_a_list_in_an_error_has_twenty_prompts_and_the_number_of_the_others():
    names = [f"p{i}" for i in range(21)]
    assert listed(names[:20]) == ", ".join(map(repr, names[:20]))
    assert listed(names, quoted=False) == ", ".join(names[:20]) + " and 1 more"


def test_a_wait_is_described_by_what_is_missing():
    core = QueueCore(TASKS, QueueOptions())
    train = core.groups.tasks["train"]
    assert core.groups.describe_wait(train, now=5.0) == "0 ready, nothing issued"
    core.issue([(f"p{i}", None) for i in range(4)], num_sessions=2, now=1.5)
    core.drop(core.groups.find_open("p3"), "why", reissue=False, now=1.5)
    put(core, [("p0", [1])])
    put(core, [("p1", [0, 1]), ("p2", [0, 1])])
    lease(core, "log")
    assert core.groups.describe_wait(train, now=5.0) == (
        "0 ready, 1 dropped, 1 issued, 2 settled, prompt 'p0' has lacked sessions [0] for 3.5 s, 2 groups lack columns "
        "['values']"
    )
    log = core.groups.tasks["log"]
    assert core.groups.describe_wait(log, now=5.0).endswith("for 3.5 s, 1 leased by another consumer of this task")


# -- capacity


@pytest.mark.parametrize(
    ("rows", "size", "fits"), [(6, 60, True), (7, 60, False), (6, 61, False), (0, 99, True), (1, 1, True)]
)
def test_rows_fit_up_to_the_bounds_with_what_is_reserved(rows, size, fits):
    core, capacity = core_with(1), Capacity(None, reservation_s=60.0)
    core.options = QueueOptions(capacity_rows=10, capacity_bytes=100)
    assert capacity.fits(core, 1000, 1000, waiting_tasks=set()), "nothing is settled, so waiting would never end"
    put(core, [("p0", [0])], rows=1, size=10)
    number, place = capacity.reserve(Reserve([("p0", [0])], 3, 30, 0, "put", 0.0), "client")
    assert (place, capacity.num_rows, capacity.size_bytes, capacity.clients) == (None, 3, 30, ["client"])
    assert capacity.fits(core, rows, size, waiting_tasks=set()) == fits
    capacity.end(number)
    assert (capacity.num_rows, capacity.size_bytes, capacity.clients) == (0, 0, [])
    assert capacity.fits(core, 9, 90, waiting_tasks=set())


def test_rows_beyond_the_bounds_are_taken_if_every_consumer_waits_for_more():
    core, capacity = core_with(2), Capacity(None, reservation_s=60.0)
    core.options = QueueOptions(capacity_rows=1)
    put(core, [("p0", [0])])
    for waiting, fits in (
        ({"reference", "log"}, True),
        ({"reference", "log", "train"}, True),
        ({"log"}, False),
        ({"train"}, False),
        ({GENERATE}, False),
        (set(), False),
    ):
        assert capacity.fits(core, 1, 1, waiting_tasks=waiting) == fits, waiting
    claim = lease(core, GENERATE)
    assert capacity.fits(core, 1, 1, waiting_tasks={"reference", "log"}), "a claim adds rows, and takes none"
    core.end_lease(claim.lease_id, "was released")
    lease(core, "log")
    assert not capacity.fits(core, 1, 1, waiting_tasks={"reference", "log"})


class Places:
    """Allocates numbered places, and records those that are freed."""

    def __init__(self):
        self.asked, self.freed = [], []

    def allocate(self, size_bytes, client):
        self.asked.append((size_bytes, client))
        return len(self.asked)

    def free(self, place):
        self.freed.append(place)


def test_reservations_end_with_their_put_their_client_or_their_time(monkeypatch):
    now, places, expired = 100.0, Places(), []
    monkeypatch.setattr("rl_core.queue.capacity.time", SimpleNamespace(monotonic=lambda: now))
    capacity = Capacity(places, reservation_s=10.0)
    held = []
    for index, client in enumerate("bcabcd"):
        now = 100.0 + index
        held.append(capacity.reserve(Reserve([], 1, 10, 5 * index, "put", 0.0), client))
    assert held == [(number, number) for number in range(1, 7)]
    assert places.asked == [(5 * index, client) for index, client in enumerate("bcabcd")]
    assert (capacity.num_rows, capacity.size_bytes, capacity.clients) == (6, 60, ["a", "b", "c", "d"])
    assert capacity.find(2) == ("c", Reserve([], 1, 10, 5, "put", 0.0), 2, 111.0)
    assert capacity.end(2).client == "c"
    with pytest.raises(NotReadyError, match="reservation 2 is unknown"):
        capacity.find(2)
    assert places.freed == []
    capacity.give_up_of("b")
    assert places.freed == [1, 4]
    now = 112.0 - 1e-3
    capacity.give_up_late(expired.append)
    assert expired == []
    now = 112.0
    capacity.give_up_late(expired.append)
    assert (expired, places.freed) == (["the reservation of a expired"], [1, 4, 3])
    capacity.give_up(5)
    capacity.give_up(5)
    capacity.give_up(1)
    assert places.freed == [1, 4, 3, 5]
    now = 1e9
    capacity.give_up_late(expired.append)
    assert (capacity.num_rows, capacity.size_bytes, capacity.clients) == (0, 0, [])
    own = Capacity(None, reservation_s=10.0)
    own.give_up(own.reserve(Reserve([], 1, 1, 1, "put", 0.0), "a")[0], "written")
    assert own.num_rows == 0


def test_a_place_that_its_client_chose_is_freed_with_its_reservation():
    places = Places()
    places.allocate = lambda size_bytes, client: None
    capacity = Capacity(places, reservation_s=10.0)
    capacity.give_up(capacity.reserve(Reserve([], 1, 1, 1, "put", 0.0), "a")[0], "written")
    assert places.freed == ["written"]


def test_a_segment_is_freed_when_nobody_needs_or_reads_it():
    table = SegmentTable()
    numbers = [table.add(place) for place in "abc"]
    assert (numbers, table.added, [*table]) == ([1, 2, 3], [1, 2, 3], [1, 2, 3])
    table.need(1)
    table.need(1)
    table.pin(1, "x")
    table.pin(1, "x")
    table.pin(1, "y")
    table.pin(2, "y")
    assert table.pins() == {1: {"x": 2, "y": 1}, 2: {"y": 1}}
    table.release(1)
    table.release(1)
    table.unpin(1, "x")
    assert table.pins()[1] == {"x": 1, "y": 1}
    table.unpin(1, "x")
    assert table.pins()[1] == {"y": 1}
    assert table.freed == []
    table.unpin_all("y")
    table.unpin(1, "y")
    assert (table.freed, [*table], 3 in table, 1 in table) == ([(1, "a"), (2, "b")], [3], True, False)
    table.number_from(3)
    assert table.add("d") == 4
    table.number_from(9)
    assert (table.add("e"), table.place(9)) == (9, "e")
    table.free_unneeded()
    assert [place for _, place in table.freed] == ["a", "b", "c", "d", "e"]
    table.number_from(1)
    assert table.add("f") == 1
