"""The scheduler: prompts to start, groups of a step, the bound on staleness, and progress without stalls."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_rollout.schedule import Blockage, ScheduleOptions, Scheduler

ON_POLICY = ScheduleOptions(groups_per_step=3, num_steps=4, max_staleness=0, sync_every=1)


def issue(scheduler: Scheduler, first: int) -> list[str]:
    """Issue and start as many prompts as allowed; return the started uids."""
    waiting, num_new = scheduler.to_start()
    new = [f"p{first + index}" for index in range(num_new)]
    scheduler.issued(new)
    scheduler.started([*waiting, *new])
    return [*waiting, *new]


def test_on_policy_waits_for_the_weights_of_each_step():
    scheduler = Scheduler(ON_POLICY)
    assert issue(scheduler, 0) == ["p0", "p1", "p2"]
    assert issue(scheduler, 3) == []
    for uid in ("p2", "p0"):
        scheduler.settled(uid, oldest_version=0)
    assert scheduler.next_step() is None
    scheduler.settled("p1", oldest_version=0)
    assert scheduler.next_step() == ("p0", "p1", "p2"), "in the order of issue, as a synchronous step"
    scheduler.trained(("p0", "p1", "p2"))
    assert issue(scheduler, 3) == [], "version 1 is not served yet"
    scheduler.published(1)
    assert issue(scheduler, 3) == ["p3", "p4", "p5"]


def test_streaming_trains_what_is_there_within_a_version():
    scheduler = Scheduler(replace(ON_POLICY, sync_every=2))
    assert len(issue(scheduler, 0)) == 6
    for uid in ("p5", "p3", "p1"):
        scheduler.settled(uid, oldest_version=0)
    assert scheduler.next_step() == ("p1", "p3", "p5")
    scheduler.trained(("p1", "p3", "p5"))
    assert scheduler.learner_version == 0
    for uid in ("p0", "p2", "p4"):
        scheduler.settled(uid, oldest_version=0)
    scheduler.trained(("p0", "p2", "p4"))
    assert scheduler.learner_version == 1
    assert issue(scheduler, 6) == []


def test_the_learner_waits_for_a_slow_group_before_it_would_be_stale():
    scheduler = Scheduler(replace(ON_POLICY, max_staleness=1))
    assert len(issue(scheduler, 0)) == 6
    for uid in ("p1", "p2", "p3"):
        scheduler.settled(uid, oldest_version=0)
    scheduler.trained(scheduler.next_step() or ())
    scheduler.published(1)
    assert len(issue(scheduler, 6)) == 3
    for uid in ("p4", "p5", "p6", "p7"):
        scheduler.settled(uid, oldest_version=1 if uid > "p5" else 0)
    assert scheduler.next_step() is None, "p0 must be in this step: at the next version it is too old"
    blockage = scheduler.blockage()
    assert blockage is not None
    assert (blockage.num_ready, blockage.num_wanted, blockage.awaited) == (4, 3, ("p0",))
    scheduler.settled("p0", oldest_version=0)
    assert scheduler.next_step() == ("p0", "p4", "p5")


def test_groups_of_older_weights_than_were_told_do_not_stop_the_learner():
    """Engines load version 1 late, so more groups of version 0 exist than can be trained in time."""
    scheduler = Scheduler(replace(ON_POLICY, max_staleness=1))
    first = issue(scheduler, 0)
    for uid in first[:3]:
        scheduler.settled(uid, oldest_version=0)
    scheduler.trained(scheduler.next_step() or ())
    scheduler.published(1)
    second = issue(scheduler, 6)
    for uid in (*first[3:], *second):
        scheduler.settled(uid, oldest_version=0)
    scheduler.trained(scheduler.next_step() or ())
    assert scheduler.num_steps == 2
    assert scheduler.stale() == tuple(second)
    for uid in scheduler.stale():
        scheduler.reissued(uid)
    scheduler.published(2)
    assert set(second) <= set(issue(scheduler, 9))


def test_a_forced_step_whose_group_fails_is_made_of_what_is_there():
    scheduler = Scheduler(replace(ON_POLICY, max_staleness=1))
    uids = issue(scheduler, 0)
    scheduler.force([uids[3:], uids[:3]])
    scheduler.failed(uids[4])
    for uid in (*uids[:4], uids[5]):
        scheduler.settled(uid, oldest_version=0)
    assert scheduler.next_step() == tuple(uids[:3])


def test_a_group_that_failed_is_replaced_but_not_on_policy():
    stale = Scheduler(replace(ON_POLICY, max_staleness=1))
    issue(stale, 0)
    stale.failed("p0")
    assert issue(stale, 6) == ["p6"]
    scheduler = Scheduler(ON_POLICY)
    issue(scheduler, 0)
    scheduler.failed("p0")
    assert issue(scheduler, 3) == []
    for uid in ("p1", "p2"):
        scheduler.settled(uid, oldest_version=0)
    assert scheduler.next_step() == ("p1", "p2")
    scheduler.trained(("p1", "p2"))
    scheduler.published(1)
    assert len(issue(scheduler, 3)) == 3


def test_a_refused_group_is_replaced_on_policy_too():
    scheduler = Scheduler(ON_POLICY)
    issue(scheduler, 0)
    scheduler.failed("p0", is_refused=True)
    assert issue(scheduler, 3) == ["p3"]


def test_an_on_policy_step_without_groups_is_told():
    scheduler = Scheduler(ON_POLICY)
    for uid in issue(scheduler, 0):
        scheduler.failed(uid)
    assert scheduler.is_without_groups
    assert scheduler.next_step() is None


def test_lost_groups_start_again_before_new_ones():
    scheduler = Scheduler(replace(ON_POLICY, max_staleness=1, max_inflight_groups=2))
    assert issue(scheduler, 0) == ["p0", "p1"]
    scheduler.returned(["p1", "p0"])
    assert issue(scheduler, 2) == ["p0", "p1"]


def test_the_limit_of_groups_in_flight():
    scheduler = Scheduler(replace(ON_POLICY, max_staleness=1, max_inflight_groups=2))
    assert len(issue(scheduler, 0)) == 2
    scheduler.settled("p0", oldest_version=0)
    assert issue(scheduler, 2) == ["p2"]


def test_steps_are_trained_again_after_the_last_checkpoint():
    scheduler = Scheduler(replace(ON_POLICY, max_staleness=2))
    issue(scheduler, 0)
    for index in range(9):
        scheduler.settled(f"p{8 - index}", oldest_version=0)
    taken = []
    for version in (1, 2, 3):
        step = scheduler.next_step()
        assert step is not None
        taken.append(step)
        scheduler.trained(step)
        scheduler.published(version)
    assert scheduler.saved(1) == taken[0]
    assert scheduler.unsaved == (*taken[1], *taken[2])
    scheduler.rewind()
    assert (scheduler.num_steps, scheduler.num_trained) == (1, 3)
    for step in taken[1:]:
        assert scheduler.next_step() == step
        scheduler.trained(step)
    assert scheduler.saved(3) == (*taken[1], *taken[2])


def test_forced_steps_wait_for_their_groups():
    scheduler = Scheduler(replace(ON_POLICY, max_staleness=1))
    issue(scheduler, 0)
    scheduler.force([("p5", "p4", "p3")])
    for uid in ("p0", "p1", "p2", "p3"):
        scheduler.settled(uid, oldest_version=0)
    assert scheduler.next_step() is None
    blockage = scheduler.blockage()
    assert blockage is not None
    assert blockage.awaited == ("p5", "p4")
    for uid in ("p4", "p5"):
        scheduler.settled(uid, oldest_version=0)
    assert scheduler.next_step() == ("p5", "p4", "p3")


@pytest.mark.parametrize("is_partial", [False, True])
@given(
    groups_per_step=st.integers(1, 4),
    num_steps=st.integers(1, 12),
    max_staleness=st.integers(0, 3),
    sync_every=st.integers(1, 3),
    limit=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.integers(0, 2**32),
)
def test_any_order_of_arrivals_ends_with_every_group_in_time(
    is_partial, groups_per_step, num_steps, max_staleness, sync_every, limit, seed
):
    """Groups arrive in any order, fail and are lost; no group is trained too late, and the run never stalls."""
    options = ScheduleOptions(
        groups_per_step=groups_per_step,
        num_steps=num_steps,
        max_staleness=max_staleness,
        sync_every=sync_every,
        max_inflight_groups=limit,
    )
    scheduler, draw = Scheduler(options), random.Random(seed)
    started: dict[str, int] = {}
    trained: list[str] = []
    num_issued, pending = 0, 0
    while not scheduler.is_done:
        waiting, num_new = scheduler.to_start()
        new = [f"p{num_issued + index}" for index in range(num_new)]
        num_issued += num_new
        scheduler.issued(new)
        scheduler.started([*waiting, *new])
        started.update(dict.fromkeys([*waiting, *new], scheduler.served_version))
        choices = ["settle"] * 6 * bool(scheduler.inflight) + ["publish"] * (pending > scheduler.served_version)
        step = scheduler.next_step()
        choices += ["train"] * 3 * (step is not None)
        choices += ["fail", "lose"] * bool(scheduler.inflight)
        if scheduler.is_without_groups:
            return  # every group of an on-policy step failed, which ends the run
        assert choices, f"nobody can do anything: {scheduler.blockage()}"
        what = draw.choice(choices)
        if what == "settle":
            uid = draw.choice(scheduler.inflight)
            newest = scheduler.served_version
            oldest = started[uid] if is_partial else draw.randint(started[uid], newest)
            scheduler.settled(uid, oldest_version=oldest)
            started[uid] = oldest
        elif what == "fail":
            scheduler.failed(draw.choice(scheduler.inflight))
        elif what == "lose":
            scheduler.returned(scheduler.inflight)
        elif what == "publish":
            scheduler.published(pending)
        else:
            for uid in step:
                assert scheduler.learner_version - started[uid] <= max_staleness
            trained.extend(step)
            scheduler.trained(step)
            assert not scheduler.stale()
            if scheduler.num_steps % sync_every == 0:
                pending = scheduler.learner_version
    assert len(trained) == len(set(trained))
    assert len(trained) + scheduler.num_spent == options.num_groups


class Reference:
    """The schedule by its definition: every decision looks at every group."""

    def __init__(self, options: ScheduleOptions) -> None:
        self.options = options
        self.waiting: list[str] = []
        self.inflight: list[str] = []
        self.ready: list[str] = []  # in order of arrival
        self.deadlines: dict[str, int] = {}
        self.begun: dict[str, int | None] = {}
        self.orders: dict[str, int] = {}
        self.steps: list[list[str]] = []  # those that were trained
        self.trained_deadlines: dict[str, int] = {}
        self.forced: list[list[str]] = []
        self.replayed: set[str] = set()
        self.num_saved = self.num_spent = self.served = 0

    @property
    def num_trained(self) -> int:
        return sum(map(len, self.steps))

    @property
    def version(self) -> int:
        return len(self.steps) // self.options.sync_every

    @property
    def is_done(self) -> bool:
        return len(self.steps) >= self.options.num_steps

    def wanted(self) -> int:
        options = self.options
        if options.max_staleness or options.sync_every > 1:
            return options.groups_per_step
        return (len(self.steps) + 1) * options.groups_per_step - self.num_trained - self.num_spent

    def num_to_start(self) -> int:
        options = self.options
        per_version = options.groups_per_step * options.sync_every
        most = min((self.served + options.max_staleness + 1) * per_version, options.groups_per_step * options.num_steps)
        free = most - self.num_trained - self.num_spent - len(self.ready) - len(self.inflight)
        return max(0, min(free, (options.max_inflight_groups or 10**9) - len(self.inflight)))

    def by_deadline(self) -> list[str]:
        return sorted(self.ready, key=lambda uid: (self.deadlines[uid], self.ready.index(uid)))

    def awaited(self) -> list[str]:
        """Return groups in flight that could not all train in time if the next step does not wait for them."""
        options, chosen = self.options, self.by_deadline()[: self.wanted()]
        left = [uid for uid in (*self.inflight, *self.ready) if uid not in chosen]
        for version in sorted(self.deadlines[uid] for uid in left):
            until = min(
                (version + 1) * options.groups_per_step * options.sync_every,
                options.groups_per_step * options.num_steps,
            )
            num_left = until - self.num_trained - self.num_spent - len(chosen)
            if sum(self.deadlines[uid] <= version for uid in left) > num_left:
                return [uid for uid in self.inflight if self.deadlines[uid] <= version]
        return []

    def next_step(self) -> tuple[str, ...] | None:
        if self.is_done:
            return None
        if self.forced:
            return tuple(self.forced[0]) if {*self.forced[0]} <= {*self.ready} else None
        if not 0 < self.wanted() <= len(self.ready) or self.awaited():
            return None
        return tuple(sorted(self.by_deadline()[: self.wanted()], key=self.orders.__getitem__))


class Both:
    """Makes the same random events happen to the scheduler and to its reference."""

    def __init__(self, options: ScheduleOptions, seed: int) -> None:
        self.scheduler, self.known, self.draw = Scheduler(options), Reference(options), random.Random(seed)

    def some(self, uids: Iterable[str]) -> list[str]:
        uids = list(uids)
        return self.draw.sample(uids, self.draw.randint(min(1, len(uids)), min(2, len(uids))))

    def remove(self, uid: str) -> None:
        for uids in (self.known.waiting, self.known.inflight, self.known.ready):
            if uid in uids:
                uids.remove(uid)

    def issue(self) -> None:
        first = len(self.known.orders)
        begun = self.draw.choice([None, None, 0, 1])
        new = [f"p{first + index}" for index in range(self.draw.randint(1, 3))]
        self.scheduler.issued(new, begun=begun)
        self.known.orders.update({uid: first + index for index, uid in enumerate(new)})
        self.known.begun.update(dict.fromkeys(new, begun))
        self.known.waiting += new

    def start(self) -> None:
        uids, _ = self.scheduler.to_start()
        self.scheduler.started(uids)
        for uid in uids:
            self.remove(uid)
            self.known.inflight.append(uid)
            self.known.deadlines[uid] = self.known.served + self.known.options.max_staleness
            if self.known.begun[uid] is None:
                self.known.begun[uid] = self.known.served

    def settle(self) -> None:
        for uid in self.some([*self.known.inflight * 3, *self.known.waiting])[:1]:
            oldest = self.draw.choice([None, self.draw.randint(0, self.known.served)])
            self.scheduler.settled(uid, oldest_version=oldest)
            self.remove(uid)
            self.known.ready.append(uid)
            if oldest is None:
                self.known.replayed.add(uid)
            if oldest is not None or uid not in self.known.deadlines:
                version = self.known.served if oldest is None else oldest
                self.known.deadlines[uid] = version + self.known.options.max_staleness

    def lose(self) -> None:
        lost = self.some(self.known.inflight)
        self.scheduler.returned(lost)
        for uid in lost:
            self.remove(uid)
            del self.known.deadlines[uid]
        self.known.waiting[:0] = sorted(lost, key=self.known.orders.__getitem__)

    def fail(self) -> None:
        for uid in self.some([*self.known.waiting, *self.known.inflight, *self.known.ready])[:1]:
            is_refused = self.draw.random() < 0.5
            self.scheduler.failed(uid, is_refused=is_refused)
            self.remove(uid)
            self.known.deadlines.pop(uid, None)
            index = next((i for i, step in enumerate(self.known.forced) if uid in step), None)
            self.known.forced = self.known.forced[:index]
            options = self.known.options
            self.known.num_spent += options.max_staleness == 0 and options.sync_every == 1 and not is_refused

    def reissue(self) -> None:
        forced = {uid for step in self.known.forced for uid in step}
        for uid in self.some(uid for uid in self.known.ready if uid not in forced)[:1]:
            self.scheduler.reissued(uid)
            self.remove(uid)
            del self.known.deadlines[uid]
            self.known.replayed.discard(uid)
            self.known.waiting.insert(0, uid)

    def train(self) -> None:
        step = self.known.next_step()
        if step is None:
            return
        self.scheduler.trained(step)
        for uid in step:
            self.remove(uid)
            self.known.trained_deadlines[uid] = self.known.deadlines.pop(uid)
        self.known.steps.append(list(step))
        self.known.forced = self.known.forced[1:]

    def publish(self) -> None:
        self.known.served = max(self.known.served, self.known.version)
        self.scheduler.published(self.known.served)

    def save(self) -> None:
        step = self.draw.randint(self.known.num_saved, len(self.known.steps))
        kept = tuple(uid for one in self.known.steps[self.known.num_saved : step] for uid in one)
        assert self.scheduler.saved(step) == kept
        self.known.num_saved = step
        self.known.replayed -= {*kept}

    def rewind(self) -> None:
        again = self.known.steps[self.known.num_saved :]
        arrivals = {uid: self.scheduler._unsaved[i][uid].arrival for i, one in enumerate(again) for uid in one}
        arrivals |= {uid: self.scheduler._groups[uid].arrival for uid in self.known.ready}
        self.scheduler.rewind()
        self.known.steps = self.known.steps[: self.known.num_saved]
        self.known.forced = [*again, *self.known.forced]
        back = [uid for one in again for uid in one]
        self.known.deadlines |= {uid: self.known.trained_deadlines[uid] for uid in back}
        self.known.ready = sorted([*self.known.ready, *back], key=arrivals.__getitem__)

    def force(self) -> None:
        if not self.known.forced:
            step = self.some([*self.known.waiting, *self.known.inflight, *self.known.ready])
            if step and len(step) <= self.known.wanted():
                self.scheduler.force([step])
                self.known.forced = [step]

    def event(self) -> None:
        often = [self.issue, self.start, self.settle, self.settle, self.settle, self.train, self.train, self.publish]
        self.draw.choice([*often, self.lose, self.fail, self.reissue, self.save, self.rewind, self.force])()

    def check(self) -> None:
        scheduler, known = self.scheduler, self.known
        assert scheduler.inflight == tuple(known.inflight)
        counts = scheduler.num_inflight, scheduler.num_ready, scheduler.num_waiting
        assert counts == (len(known.inflight), len(known.ready), len(known.waiting))
        assert (scheduler.num_trained, scheduler.num_steps) == (known.num_trained, len(known.steps))
        assert (scheduler.learner_version, scheduler.is_done) == (known.version, known.is_done)
        assert (scheduler.num_spent, scheduler.replayed) == (known.num_spent, known.replayed)
        assert scheduler.unsaved == tuple(uid for step in known.steps[known.num_saved :] for uid in step)
        count = known.num_to_start()
        assert scheduler.num_to_start() == count
        assert scheduler.to_start() == (known.waiting[:count], count - len(known.waiting[:count]))
        assert scheduler.stale() == tuple(uid for uid in known.by_deadline() if known.deadlines[uid] < known.version)
        step = known.next_step()
        assert scheduler.next_step() == step
        assert scheduler.is_without_groups == (not known.is_done and not known.forced and known.wanted() <= 0)
        found = scheduler.blockage()
        if known.is_done or step is not None:
            assert found is None
        elif known.forced:
            missing = tuple(uid for uid in known.forced[0] if uid not in known.ready)
            size = len(known.forced[0])
            assert found == Blockage(num_ready=size - len(missing), num_wanted=size, awaited=missing)
        elif known.wanted() > 0:
            awaited = tuple(known.awaited())
            assert found == Blockage(num_ready=len(known.ready), num_wanted=known.wanted(), awaited=awaited)
        for uid in (*known.waiting, *known.inflight, *known.ready):
            assert scheduler.is_open(uid) == (uid not in known.ready)
            begun = known.begun[uid]
            told = [None if begun is not None and version < begun else version for version in (0, 1, 2)]
            assert [scheduler.sampled_since(uid, version) for version in (0, 1, 2)] == told
            assert scheduler.sampled_since(uid, None) is None


@pytest.mark.parametrize("limit", [None, 2, 5])
@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_decision_is_that_of_the_rules_whatever_happens(max_staleness, sync_every, limit):
    for seed in range(4):
        options = ScheduleOptions(
            groups_per_step=2,
            num_steps=6,
            max_staleness=max_staleness,
            sync_every=sync_every,
            max_inflight_groups=limit,
        )
        both = Both(options, seed)
        for _ in range(120):
            both.event()
            both.check()


@pytest.mark.parametrize(
    ("sync_every", "versions"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 0, 1, 1, 2, 3]), (3, [0, 0, 0, 1, 1, 2])]
)
def test_the_last_step_always_ends_a_version(sync_every, versions):
    options = ScheduleOptions(groups_per_step=2, num_steps=5, sync_every=sync_every)
    assert [options.version_after(step) for step in range(6)] == versions
    assert (options.max_staleness, options.max_inflight_groups) == (1, None)
    assert (options.groups_per_version, options.num_groups) == (2 * sync_every, 10)
