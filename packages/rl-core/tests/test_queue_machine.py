"""Random sequences of calls and crashes: the queue is compared with a simple model."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from queue_model import LEASE_S, NUM_SESSIONS, Group, Held, QueueModel, tasks_of

from rl_core import Batch, InProcessQueue, QueueOptions
from rl_core.data.records import NO_VERSION
from rl_core.errors import (
    AlreadySettledError,
    DataError,
    DeadlineError,
    OutdatedLeaseError,
)
from rl_core.testing import make_prompt, make_trajectory, ragged_like

INDEX = st.integers(0, 1_000)
OUTPUTS = st.lists(st.integers(-1, 2), max_size=2)
"""For each row of a session: how many versions its tokens lag behind; -1 if none was sampled."""


class QueueMachine(QueueModel, RuleBasedStateMachine):
    @initialize(max_staleness=st.sampled_from([None, 0, 1]))
    def open(self, max_staleness):
        self.tasks = tasks_of(max_staleness)
        self.options = QueueOptions()
        self.queue = InProcessQueue(list(self.tasks.values()), options=self.options, clock=self.clock)

    # -- producers

    @rule(num_prompts=st.integers(1, 3))
    def issue(self, num_prompts):
        new = [Group(f"p{len(self.known) + i}") for i in range(num_prompts)]
        prompts = [make_prompt(group.uid) for group in new]
        self.queue.issue(prompts, num_sessions=NUM_SESSIONS)
        self.groups += new
        self.known += new

    @precondition(lambda self: any(group.missing for group in self.open_groups()))
    @rule(group=INDEX, session=INDEX, outputs=OUTPUTS, fails=st.booleans())
    def settle_one(self, group, session, outputs, fails):
        self.expire()
        group = self.pick([group for group in self.open_groups() if group.missing], group)
        session = self.pick(group.missing, session)
        if fails:
            self.queue.fail(group.uid, session, reason="failed")
            group.failures[session] = "failed"
        else:
            rows, group.rows[session] = self.rows_of(group, session, outputs)
            self.queue.put(group.uid, session, rows, deadline_s=0)
        self.settle(group)

    @precondition(lambda self: any(group.missing for group in self.open_groups()))
    @rule(outputs=st.lists(OUTPUTS, min_size=2, max_size=5), is_reversed=st.booleans())
    def settle_many(self, outputs, is_reversed):
        self.expire()
        missing = [(group, session) for group in self.open_groups() for session in group.missing]
        rows, empty = [], []
        for (group, session), own in zip(missing[::-1] if is_reversed else missing, outputs, strict=False):
            if own:
                more, group.rows[session] = self.rows_of(group, session, own)
                rows += more
            else:
                empty.append((group, session))
        self.queue.put_batch(Batch.from_trajectories(rows[::-1]) if rows else Batch((), {}), deadline_s=0)
        for uid in dict.fromkeys(row.prompt_uid for row in rows[::-1]):
            self.settle(self.find(uid))
        for group, session in empty:
            self.queue.put(group.uid, session, [], deadline_s=0)
            group.rows[session] = []
            self.settle(group)

    @rule(num_prompts=st.integers(1, 3), behind=st.integers(-1, 2), is_reversed=st.booleans())
    def make_ready(self, num_prompts, behind, is_reversed):
        """Put whole groups with the reference's column, so that they are ready to train."""
        self.issue(num_prompts)
        num_missing = sum(len(group.missing) for group in self.open_groups())
        self.settle_many([[behind]] * num_missing, is_reversed)
        ready = [group for group in self.groups if self.is_ready(group, "reference")]
        if ready:
            self.work("reference", len(ready), more=0, seconds=0)

    def rows_of(self, group, session, outputs):
        """Return a session's trajectories, one per entry of `outputs` (versions behind), and their versions."""
        versions = [None if behind < 0 else max(self.version - behind, 0) for behind in outputs]
        rows = []
        for output, version in enumerate(versions):
            num_tokens = 0 if version is None else 2
            tokens = [NO_VERSION] * 2 + [version] * num_tokens
            rows.append(
                make_trajectory(
                    group.uid,
                    session,
                    output,
                    num_response_tokens=num_tokens,
                    policy_versions=np.asarray(tokens, dtype=np.int32),
                    reward=float(group.attempt),
                )
            )
        return rows, versions

    @precondition(lambda self: self.groups)
    @rule(group=INDEX, session=st.integers(0, NUM_SESSIONS - 1))
    def settle_twice(self, group, session):
        group = self.pick(self.groups, group)
        if group.is_open and session in group.missing:
            return
        with pytest.raises(AlreadySettledError if group.is_open else DataError):
            self.queue.put(group.uid, session, [make_trajectory(group.uid, session)], deadline_s=0)

    @rule(num_prompts=st.integers(1, 3))
    def claim(self, num_prompts):
        self.expire()
        taken = self.taken("generate")
        issued = [group for group in self.groups if group.state == "issued"]
        expected = [group for group in issued if group not in taken][:num_prompts]
        if not expected:
            with pytest.raises(DeadlineError):
                self.queue.claim(prompts=num_prompts, deadline_s=0)
            return
        claim = self.queue.claim(prompts=num_prompts, deadline_s=0, claim_s=LEASE_S)
        assert [prompt.uid for prompt in claim.prompts] == [group.uid for group in expected]
        assert claim.sessions == tuple(tuple(group.missing) for group in expected)
        self.held[claim.lease_id] = Held(claim, "generate", expected, claim.expires_at)

    # -- consumers

    @rule(
        task=st.sampled_from(["reference", "train", "log"]),
        num_groups=st.integers(1, 4),
        allow_fewer=st.booleans(),
    )
    def lease(self, task, num_groups, allow_fewer):
        self.expire()
        expected = self.expected_lease(task, num_groups, allow_fewer)
        self.take(task, expected, allow_fewer=allow_fewer, groups=num_groups)

    @precondition(lambda self: self.known)
    @rule(
        task=st.sampled_from(["reference", "train", "train", "log"]),
        picks=st.lists(INDEX, min_size=1, max_size=3),
        are_ready=st.sampled_from([True, True, False]),
    )
    def lease_named(self, task, picks, are_ready):
        self.expire()
        uids = self.named(task, picks, are_ready)
        self.take(task, self.expected_named(task, uids), prompts=uids)

    def named(self, task, picks, are_ready):
        """Return uids of ready prompts; without are_ready, of any prompts, including forgotten and repeated ones."""
        ready = [group for group in self.groups if self.is_ready(group, task)]
        uids = [self.pick((ready if are_ready else None) or self.known, pick).uid for pick in picks]
        return list(dict.fromkeys(uids)) if are_ready else uids

    def take(self, task, expected, **asked):
        if not isinstance(expected, list):
            with pytest.raises(expected):
                self.queue.lease(task, deadline_s=0, lease_s=LEASE_S, **asked)
            return
        lease = self.queue.lease(task, deadline_s=0, lease_s=LEASE_S, **asked)
        assert [prompt.uid for prompt in lease.prompts] == [group.uid for group in expected]
        assert list(lease.batch.keys) == [key for group in expected for key in group.keys]
        attempts = [float(group.attempt) for group in expected for _ in group.keys]
        assert lease.batch.dense("reward").tolist() == attempts
        if task == "train":
            assert [row[0] for row in lease.batch.ragged("reference_logprobs")] == self.values_of(lease)
        assert lease.lease_id not in self.held
        assert lease.lease_id not in {held.lease.lease_id for held in self.ended}
        self.held[lease.lease_id] = Held(lease, task, expected, lease.expires_at)

    def values_of(self, lease):
        return [self.find(key.prompt_uid).value(key.session_index) for key in lease.batch.keys]

    def given(self, held):
        if held.task != "reference":
            return {}
        values = [
            held.groups[[group.uid for group in held.groups].index(key.prompt_uid)].value(key.session_index)
            for key in held.lease.batch.keys
        ]
        return {"reference_logprobs": ragged_like(held.lease.batch, "reference_logprobs", values)}

    @rule(
        task=st.sampled_from(["reference", "train", "train", "log"]),
        amount=st.integers(1, 3),
        more=st.sampled_from([0, 0, 1, 2]),
        seconds=st.sampled_from([0, 0, 0, LEASE_S]),
    )
    def work(self, task, amount, more, seconds):
        """Lease and ack as a consumer does, with publications and a pause in between."""
        before = set(self.held)
        self.lease(task, amount, allow_fewer=True)
        if self.held.keys() - before:
            held = self.held[max(self.held)]
            self.publish(more)
            self.let_time_pass(seconds)
            self.ack_one(held)

    @precondition(lambda self: any(held.task != "generate" for held in self.held.values()))
    @rule(index=INDEX)
    def ack(self, index):
        self.ack_one(self.pick([held for held in self.held.values() if held.task != "generate"], index))

    def ack_one(self, held):
        given = self.given(held)
        self.expire()
        if held.lease.lease_id not in self.held:
            with pytest.raises(OutdatedLeaseError):
                self.queue.ack(held.lease, given)
            return
        self.queue.ack(held.lease, given)
        self.end(held)
        for group in held.groups:
            group.acked.add(held.task)

    @precondition(lambda self: self.known)
    @rule(
        task=st.sampled_from(["reference", "train", "train", "log"]),
        picks=st.lists(INDEX, min_size=1, max_size=3),
        are_ready=st.sampled_from([True, True, True, False]),
    )
    def finish(self, task, picks, are_ready):
        """Finish groups; the queue refuses them all if one is repeated or not ready, or if the task adds columns."""
        self.expire()
        uids = self.named(task, picks, are_ready)
        ready = {group.uid: group for group in self.groups if self.is_ready(group, task)}
        if task == "reference" or len(set(uids)) < len(uids) or not ready.keys() >= set(uids):
            with pytest.raises(DataError):
                self.queue.finish(task, uids)
            return
        self.queue.finish(task, uids)
        for uid in uids:
            ready[uid].acked.add(task)

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def release(self, index):
        held = self.pick(list(self.held.values()), index)
        self.expire()
        self.queue.release(held.lease)
        if held.lease.lease_id in self.held:
            self.end(held)

    @precondition(lambda self: self.held)
    @rule(index=INDEX, seconds=st.sampled_from([1, LEASE_S]))
    def extend(self, index, seconds):
        held = self.pick(list(self.held.values()), index)
        self.expire()
        if held.lease.lease_id in self.held:
            held.lease = self.queue.extend(held.lease, lease_s=seconds)
            held.expires_at = self.clock() + seconds
            assert held.lease.expires_at == held.expires_at
        else:
            with pytest.raises(OutdatedLeaseError):
                self.queue.extend(held.lease, lease_s=seconds)

    @precondition(lambda self: self.ended)
    @rule(index=INDEX)
    def come_late(self, index):
        self.expire()
        held = self.pick(self.ended, index)
        self.queue.release(held.lease)
        with pytest.raises(OutdatedLeaseError):
            self.queue.extend(held.lease, lease_s=LEASE_S)
        if held.task == "generate":
            return
        empty = held.lease.batch.ragged("input_ids").lengths.tolist()
        given = {"reference_logprobs": ragged_like(held.lease.batch, "reference_logprobs", [0.0] * len(empty))}
        with pytest.raises(OutdatedLeaseError):
            self.queue.ack(held.lease, given if held.task == "reference" else {})

    # -- any process

    @precondition(lambda self: self.open_groups())
    @rule(group=INDEX, reissue=st.booleans())
    def drop(self, group, reissue):
        self.expire()
        group = self.pick(self.open_groups(), group)
        self.queue.drop(group.uid, reason="dropped", reissue=reissue)
        self.take_out(group, "dropped", reissue=reissue)

    @rule(more=st.integers(-1, 2))
    def publish(self, more):
        self.queue.set_policy_version(self.version + more)
        self.version = max(self.version, self.version + more)

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0, 11.0]))
    def let_time_pass(self, seconds):
        self.clock.advance(seconds)
        self.expire()

    @rule()
    def forget(self):
        finished = [group for group in self.groups if not group.is_open]
        assert self.queue.forget_finished() == len(finished)
        self.groups = [group for group in self.groups if group not in finished]

    def teardown(self):
        if hasattr(self, "queue"):
            self.queue.close()

    # -- invariants

    @invariant()
    def what_is_counted_is_there(self):
        stats = self.queue.stats()
        assert stats["rows"] == sum(len(group.keys) for group in self.open_groups())
        assert (stats["size_bytes"] > 0) == (stats["rows"] > 0)
        claims = sum(held.task == "generate" for held in self.held.values())
        assert (stats["leases"], stats["claims"]) == (len(self.held) - claims, claims)
        for state, count in Counter(group.state for group in self.groups).items():
            assert stats[f"groups/{state}"] == count
        for reason, count in self.drops.items():
            assert stats[f"drops/{reason}"] == count
        assert stats["reissued"] == self.counts["reissued"]

    @invariant()
    def the_ledger_agrees(self):
        entries = self.queue.ledger()
        assert [entry.prompt_uid for entry in entries] == [group.uid for group in self.groups]
        for entry, group in zip(entries, self.groups, strict=True):
            assert (entry.state, entry.attempt, entry.reason) == (group.state, group.attempt, group.reason)
            assert entry.acked_by == group.acked
            if group.is_open:
                assert entry.num_rows == len(group.keys)
                assert entry.policy_versions == group.versions
                assert entry.sessions_failed == group.failures
                assert entry.sessions_settled == NUM_SESSIONS - len(group.missing)

    @invariant()
    def what_is_missing_is_listed(self):
        found = [(u.prompt.uid, list(u.sessions), u.attempt, u.is_claimed) for u in self.queue.unsettled()]
        claimed = self.taken("generate")
        issued = [group for group in self.groups if group.state == "issued"]
        expected = [(group.uid, group.missing, group.attempt, group in claimed) for group in issued]
        assert found == expected


class CrashMachine(QueueMachine):
    """The same machine on a queue with a journal, with crashes."""

    @initialize(max_staleness=st.sampled_from([None, 1]))
    def open(self, max_staleness):
        self.folder = Path(tempfile.mkdtemp(prefix="queue-machine-"))
        self.num_crashes = 0
        self.tasks = tasks_of(max_staleness)
        self.options = QueueOptions(directory=self.folder / "0")
        self.queue = InProcessQueue(list(self.tasks.values()), options=self.options, clock=self.clock)

    @rule(is_closed=st.booleans())
    def crash(self, is_closed):
        """Reopen a copy of the directory: acks persist, and leased groups return to the queue."""
        self.expire()
        self.num_crashes += 1
        copy = self.folder / str(self.num_crashes)
        if is_closed:
            self.queue.close()
        shutil.copytree(self.options.directory, copy)
        self.queue.close()
        self.options = QueueOptions(directory=copy)
        self.queue = InProcessQueue(list(self.tasks.values()), options=self.options, clock=self.clock)
        for held in list(self.held.values()):
            self.end(held)
        self.arrivals = 0
        for group in self.groups:
            if group.state == "settled":
                group.arrival = self.arrivals = self.arrivals + 1
        recovery = self.queue.recovery()
        assert recovery.prompts == Counter(group.state for group in self.groups)
        assert recovery.num_acks == sum(len(group.acked) for group in self.groups)
        assert recovery.num_unsettled == sum(group.state == "issued" for group in self.groups)
        assert recovery.lost_segments == ()

    def teardown(self):
        super().teardown()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestQueueMachine = pytest.mark.one_python("it calls the queue thousands of times; the conformance suite has each call")(
    QueueMachine.TestCase
)
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCrashMachine = CrashMachine.TestCase
TestCrashMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


@pytest.mark.soak
class TestTransferQueueMachineForLong(QueueMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=80, deadline=None)


@pytest.mark.soak
class TestTransferQueueCrashMachineForLong(CrashMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
