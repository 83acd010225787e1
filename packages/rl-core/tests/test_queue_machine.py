"""Any order of calls: the queue against a model of a few lines."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl_core import InProcessQueue, TaskSpec
from rl_core.errors import DeadlineError, NothingToLeaseError, OutdatedLeaseError
from rl_core.testing import FakeClock, make_prompt, make_trajectory, ragged_like

NUM_SESSIONS = 2
TASKS = {
    "reference": TaskSpec(name="reference", needs=frozenset({"input_ids"}), gives=frozenset({"reference_logprobs"})),
    "train": TaskSpec(name="train", needs=frozenset({"reward", "reference_logprobs"})),
}
INDEX = st.integers(0, 1_000)


class ModelGroup:
    def __init__(self, uid):
        self.uid, self.rows, self.acked, self.is_dropped = uid, {}, [], False

    @property
    def is_open(self):
        return not self.is_dropped and self.acked != ["reference", "train"]

    @property
    def missing(self):
        return [session for session in range(NUM_SESSIONS) if session not in self.rows]

    @property
    def keys(self):
        return [(self.uid, session, row) for session in sorted(self.rows) for row in range(self.rows[session])]

    def awaits(self, task):
        """True when the task comes next for it: the reference first, then training."""
        done = {"reference": [], "train": ["reference"]}[task]
        return self.is_open and not self.missing and self.acked == done


class QueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.queue = InProcessQueue(list(TASKS.values()), clock=self.clock)
        self.groups = []
        self.leases = []  # (lease, task, groups), with those that are over
        self.over = set()
        self.num_forgotten = 0

    def open_groups(self):
        return [group for group in self.groups if group.is_open]

    def pick(self, items, index):
        return items[index % len(items)]

    def held(self, task):
        """Groups in leases of a task that are not over."""
        return [
            group for lease, name, groups in self.leases if name == task and self.is_running(lease) for group in groups
        ]

    def is_running(self, lease):
        return lease.lease_id not in self.over and lease.expires_at > self.clock()

    @rule(num_prompts=st.integers(1, 3))
    def issue(self, num_prompts):
        new = [ModelGroup(f"p{len(self.groups) + i}") for i in range(num_prompts)]
        self.queue.issue([make_prompt(group.uid) for group in new], num_sessions=NUM_SESSIONS)
        self.groups += new

    @precondition(lambda self: any(group.missing for group in self.open_groups()))
    @rule(group=INDEX, session=INDEX, num_rows=st.integers(0, 2), fails=st.booleans())
    def settle(self, group, session, num_rows, fails):
        group = self.pick([group for group in self.open_groups() if group.missing], group)
        session = self.pick(group.missing, session)
        if fails:
            self.queue.fail(group.uid, session, reason="failed")
        else:
            rows = [make_trajectory(group.uid, session, output) for output in range(num_rows)]
            self.queue.put(group.uid, session, rows, deadline_s=0)
        group.rows[session] = 0 if fails else num_rows
        group.is_dropped = not group.missing and not group.keys

    @precondition(lambda self: self.open_groups())
    @rule(group=INDEX)
    def drop(self, group):
        group = self.pick(self.open_groups(), group)
        self.queue.drop(group.uid, reason="dropped")
        group.is_dropped = True
        self.over.update(lease.lease_id for lease, _, groups in self.leases if group in groups)

    @rule(task=st.sampled_from(sorted(TASKS)), num_groups=st.integers(1, 3), allow_fewer=st.booleans())
    def lease(self, task, num_groups, allow_fewer):
        held = self.held(task)
        ready = [group for group in self.groups if group.awaits(task) and group not in held]
        possible = [group for group in self.open_groups() if task not in group.acked]
        expected = ready[:num_groups]
        try:
            lease = self.queue.lease(task, groups=num_groups, deadline_s=0, lease_s=10, allow_fewer=allow_fewer)
        except NothingToLeaseError:
            assert not possible
        except DeadlineError:
            assert len(ready) < num_groups
            assert possible
            assert not (allow_fewer and len(ready) == len(possible))
        else:
            assert [prompt.uid for prompt in lease.prompts] == [group.uid for group in expected]
            assert len(expected) == num_groups or (allow_fewer and len(ready) == len(possible))
            assert list(lease.batch.keys) == [key for group in expected for key in group.keys]
            if task == "train":
                assert [row[0] for row in lease.batch.ragged("reference_logprobs")] == values_of(lease)
            self.leases.append((lease, task, expected))

    @precondition(lambda self: self.leases)
    @rule(index=INDEX, does_ack=st.booleans())
    def end_lease(self, index, does_ack):
        lease, task, groups = self.pick(self.leases, index)
        given = {}
        if task == "reference":
            given = {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", values_of(lease))}
        if not does_ack:
            self.queue.release(lease)
        elif self.is_running(lease):
            self.queue.ack(lease, given)
            for group in groups:
                group.acked.append(task)
        else:
            with pytest.raises(OutdatedLeaseError):
                self.queue.ack(lease, given)
        self.over.add(lease.lease_id)

    @precondition(lambda self: self.leases)
    @rule(index=INDEX)
    def extend(self, index):
        index %= len(self.leases)
        lease, task, groups = self.leases[index]
        if self.is_running(lease):
            self.leases[index] = (self.queue.extend(lease, lease_s=10), task, groups)
        else:
            with pytest.raises(OutdatedLeaseError):
                self.queue.extend(lease, lease_s=10)

    @rule(seconds=st.sampled_from([1.0, 5.0, 11.0]))
    def let_time_pass(self, seconds):
        self.over.update(lease.lease_id for lease, _, _ in self.leases if lease.expires_at <= self.clock() + seconds)
        self.clock.advance(seconds)

    @rule()
    def forget(self):
        finished = [group for group in self.groups if not group.is_open]
        self.num_forgotten += self.queue.forget_finished()
        assert self.num_forgotten == len(finished)

    @invariant()
    def what_is_counted_is_there(self):
        stats = self.queue.stats()
        assert stats["rows"] == sum(len(group.keys) for group in self.open_groups())
        assert stats["leases"] == sum(self.is_running(lease) for lease, _, _ in self.leases)
        assert (stats["size_bytes"] > 0) == (stats["rows"] > 0)
        is_settled = [not group.missing for group in self.open_groups()]
        assert stats.get("groups/settled", 0) == sum(is_settled)
        assert stats.get("groups/issued", 0) == len(is_settled) - sum(is_settled)

    @invariant()
    def the_ledger_agrees(self):
        states = {entry.prompt_uid: entry for entry in self.queue.ledger()}
        for group in self.open_groups():
            assert states[group.uid].acked_by == set(group.acked)
            assert states[group.uid].sessions_settled == len(group.rows)


def values_of(lease):
    """A value for each row that says which row it is."""
    return [float(np.float32(-int(key.prompt_uid[1:]) - key.session_index / 4)) for key in lease.batch.keys]


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@pytest.mark.soak
class TestQueueMachineForLong(QueueMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=80, deadline=None)
