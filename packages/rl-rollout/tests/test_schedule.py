"""The scheduler: prompts to start, groups of a step, the bound on staleness, and progress without stalls."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_rollout.schedule import ScheduleOptions, Scheduler

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
