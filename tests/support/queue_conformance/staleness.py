"""Checks of staleness: how far leased groups may be behind the published policy."""

from dataclasses import replace
from typing import Any

from queue_conformance.tools import LOG, sampled_by
from rl_core.errors import DataError, NothingToLeaseError, OutdatedLeaseError
from rl_core.queue.client import TransferQueue
from rl_core.queue.interface import TaskSpec
from rl_core.testing.fixtures import make_prompts, make_trajectory, ragged_like
from rl_core.testing.queue_checks import (
    DEADLINE_S,
    REFERENCE,
    TRAIN,
    TRAIN_IN_ORDER,
    QueueChecks,
    put_all,
    refuses,
    uids_of,
)

FRESH = replace(TRAIN, max_staleness=1)


class StalenessChecks(QueueChecks):
    """Groups older than a task allows are not leased, and every dropped one is counted."""

    def versioned(self, *tasks: TaskSpec, versions: list[int], **options: Any) -> TransferQueue:
        """Return a queue whose prompts p0, p1 and so on were sampled by these policy versions."""
        queue = self.queue(*tasks, **options)
        queue.issue(make_prompts(len(versions)), num_sessions=1)
        for index, version in enumerate(versions):
            queue.put(f"p{index}", 0, [sampled_by(f"p{index}", 0, version)])
        return queue

    def test_the_oldest_token_of_a_group_counts(self) -> None:
        queue = self.queue(FRESH)
        queue.issue(make_prompts(2), num_sessions=2)
        queue.put("p0", 0, [sampled_by("p0", 0, 3)])
        queue.put("p0", 1, [sampled_by("p0", 1, 3, 0), sampled_by("p0", 1, 3, 2, 3, output_index=1)])
        for session in range(2):
            queue.put("p1", session, [sampled_by("p1", session, 2, 3)])
        assert [entry.policy_versions for entry in queue.ledger()] == [(0, 3), (2, 3)]
        queue.set_policy_version(3)
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p1"]
        assert queue.ledger()[0].reason == "stale"

    def test_without_a_bound_or_a_sampled_token_nothing_is_stale(self) -> None:
        queue = self.queue(replace(FRESH, max_staleness=0), LOG)
        queue.issue(make_prompts(2), num_sessions=1)
        queue.put("p0", 0, [make_trajectory("p0", 0, num_response_tokens=0)])
        put_all(queue, "p1")
        queue.set_policy_version(1000)
        queue.ack(queue.lease("log", groups=2, deadline_s=0))
        lease = queue.lease("train", groups=1, deadline_s=0)
        assert (uids_of(lease), queue.ledger()[0].policy_versions) == (["p0"], None)

    def test_what_became_stale_after_it_was_leased_counts(self) -> None:
        queue = self.versioned(FRESH, versions=[0, 0, 0])
        lease = queue.lease("train", groups=1, deadline_s=0)
        queue.release(queue.lease("train", prompts=["p1"], deadline_s=0))
        queue.set_policy_version(5)
        queue.ack(lease)
        queue.finish("train", ["p1"])
        with refuses(NothingToLeaseError, "2 done", "1 dropped"):
            queue.lease("train", groups=1, deadline_s=0)

    def test_a_stale_prompt_is_generated_again_once_it_is_forgotten(self) -> None:
        queue = self.versioned(replace(TRAIN_IN_ORDER, max_staleness=0), versions=[0, 1])
        queue.set_policy_version(1)
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p1"], "p0 does not hold it up"
        assert queue.forget_finished() == 1
        queue.issue(make_prompts(1), num_sessions=1)
        queue.put("p0", 0, [sampled_by("p0", 0, 1)])
        assert uids_of(queue.lease("train", groups=1, deadline_s=0)) == ["p0"]

    def test_nothing_is_left_when_all_is_stale(self) -> None:
        queue = self.versioned(FRESH, versions=[0, 0])
        queue.set_policy_version(2)
        with refuses(NothingToLeaseError, "2 dropped"):
            queue.lease("train", groups=2, deadline_s=0)
        queue = self.versioned(FRESH, versions=[0, 2])
        queue.set_policy_version(2)
        assert uids_of(queue.lease("train", groups=2, deadline_s=0, allow_fewer=True)) == ["p1"]

    def test_a_stale_drop_ends_leases_of_other_tasks_and_delivers_no_group_twice(self) -> None:
        queue = self.versioned(REFERENCE, FRESH, versions=[2, 0, 2])
        reference = queue.lease("reference", groups=3, deadline_s=0)
        queue.set_policy_version(2)
        assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["p0", "p2"]
        given = {"reference_logprobs": ragged_like(reference.batch, "reference_logprobs", [-1.0] * 3)}
        with refuses(OutdatedLeaseError, "'p1' was dropped: stale"):
            queue.ack(reference, given)
        assert uids_of(queue.lease("reference", groups=2, deadline_s=0)) == ["p0", "p2"]

    def test_a_stale_drop_tells_consumers_of_other_tasks_that_nothing_more_can_come(self) -> None:
        queue = self.versioned(REFERENCE, FRESH, versions=[0])
        queue.issue(make_prompts(2)[1:], num_sessions=1)
        put_all(queue, "p1")
        first = queue.lease("reference", groups=2, deadline_s=0)
        queue.ack(first, {"reference_logprobs": ragged_like(first.batch, "reference_logprobs", [-1.0] * 2)})
        queue.set_policy_version(2)
        with refuses(NothingToLeaseError, "2 dropped"):
            queue.lease("train", groups=1, deadline_s=0)

    def test_a_named_group_that_is_too_stale_is_dropped_and_named(self) -> None:
        queue = self.versioned(FRESH, versions=[0, 1, 2])
        queue.set_policy_version(2)
        with refuses(DataError, "1 of 2 prompts", "exceed max_staleness = 1", "'p0'"):
            queue.lease("train", prompts=["p2", "p0"], deadline_s=DEADLINE_S)
        entries = queue.ledger()
        assert [entry.state for entry in entries] == ["dropped", "settled", "settled"]
        assert (entries[0].reason, queue.stats()["drops/stale"]) == ("stale", 1)
        assert uids_of(queue.lease("train", prompts=["p2", "p1"], deadline_s=0)) == ["p2", "p1"]

    def test_a_named_group_that_becomes_stale_during_the_wait_is_refused(self) -> None:
        queue = self.queue(replace(TRAIN, max_staleness=0))
        queue.issue(make_prompts(2), num_sessions=1)
        queue.put("p0", 0, [sampled_by("p0", 0, 0)])
        waiter = self.spawn(queue.lease, "train", prompts=["p0", "p1"], deadline_s=DEADLINE_S)
        self.wait_for_stat(queue, "waiting/lease", 1)
        queue.set_policy_version(1)
        with refuses(DataError, "exceed max_staleness", "'p0'"):
            waiter.result(DEADLINE_S)
        assert [entry.state for entry in queue.ledger()] == ["dropped", "issued"]
