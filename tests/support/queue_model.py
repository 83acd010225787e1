"""Reference model of a transfer queue's groups, leases, claims and staleness, without waits, heaps or files."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rl_core import QueueOptions, TaskSpec
from rl_core.errors import DataError, DeadlineError, NothingToLeaseError
from rl_core.testing import FakeClock

NUM_SESSIONS = 2
LEASE_S = 10


def tasks_of(max_staleness):
    """A task for each order, and one that adds a column."""
    return {
        "reference": TaskSpec(
            name="reference", needs=frozenset({"input_ids"}), gives=frozenset({"reference_logprobs"})
        ),
        "train": TaskSpec(
            name="train",
            needs=frozenset({"reward", "reference_logprobs"}),
            order="issue",
            max_staleness=max_staleness,
        ),
        "log": TaskSpec(name="log", needs=frozenset({"reward"})),
    }


@dataclass(eq=False)
class Group:
    """Expected state of a prompt; `rows` has the versions of each session's rows, None without a version."""

    uid: str
    attempt: int = 1
    rows: dict = field(default_factory=dict)
    failures: dict = field(default_factory=dict)
    acked: set = field(default_factory=set)
    reason: str | None = None
    is_dropped: bool = False
    arrival: int = -1

    @property
    def missing(self):
        return [s for s in range(NUM_SESSIONS) if s not in self.rows and s not in self.failures]

    @property
    def state(self):
        if self.is_dropped:
            return "dropped"
        is_done = self.acked == {"reference", "train", "log"}
        return "issued" if self.missing else "done" if is_done else "settled"

    @property
    def is_open(self):
        return self.state in ("issued", "settled")

    @property
    def keys(self):
        return [(self.uid, session, row) for session in sorted(self.rows) for row in range(len(self.rows[session]))]

    @property
    def versions(self):
        found = [version for rows in self.rows.values() for version in rows if version is not None]
        return (min(found), max(found)) if found else None

    def value(self, session):
        """Return the model's expectation of a row."""
        return float(np.float32(-1000.0 * self.attempt - int(self.uid[1:]) - session / 4))


@dataclass(eq=False)
class Held:
    """An active lease or claim."""

    lease: object
    task: str
    groups: list
    expires_at: float


class QueueModel:
    """Groups, their holders, and dropped groups; every change of the queue is also made here."""

    tasks: dict
    options: QueueOptions

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.groups, self.known = [], []
        self.held, self.ended = {}, []
        self.version = self.arrivals = 0
        self.drops, self.counts = Counter(), Counter()

    def find(self, uid):
        return next(group for group in self.groups if group.uid == uid)

    def pick(self, items, index):
        return items[index % len(items)]

    def open_groups(self):
        return [group for group in self.groups if group.is_open]

    def taken(self, task):
        return [group for held in self.held.values() if held.task == task for group in held.groups]

    def is_ready(self, group, task):
        is_given = task != "train" or "reference" in group.acked
        return group.state == "settled" and is_given and task not in group.acked and group not in self.taken(task)

    def is_stale(self, group, task):
        bound = self.tasks[task].max_staleness
        return bound is not None and group.versions is not None and self.version - group.versions[0] > bound

    def possible(self, task):
        return [group for group in self.open_groups() if task not in group.acked]

    def queue_of(self, task):
        """Return the groups that may come next, in the task's order; a group that is not ready blocks later ones."""
        if self.tasks[task].order == "issue":
            return [group for group in self.possible(task) if group not in self.taken(task)]
        return sorted(filter(lambda group: self.is_ready(group, task), self.groups), key=lambda group: group.arrival)

    def end(self, held):
        self.held.pop(held.lease.lease_id)
        self.ended.append(held)

    def expire(self):
        for held in list(self.held.values()):
            if held.expires_at <= self.clock():
                self.end(held)

    def settle(self, group):
        if group.missing:
            return
        self.leave_claim(group)
        if group.keys:
            group.arrival = self.arrivals = self.arrivals + 1
        else:
            why = "; ".join(sorted(set(group.failures.values()))) or "its sessions returned no trajectories"
            group.is_dropped, group.reason = True, f"no rows: {why}"
            self.drops["no rows"] += 1

    def leave_claim(self, group):
        """Remove a group from its claim, which keeps the others."""
        for claim in [held for held in self.held.values() if held.task == "generate" and group in held.groups]:
            claim.groups.remove(group)
            if not claim.groups:
                self.end(claim)

    def take_out(self, group, reason, *, reissue):
        self.leave_claim(group)
        for held in [held for held in self.held.values() if group in held.groups]:
            self.end(held)
        self.drops[reason] += 1
        group.reason, group.rows = reason, {}
        if not reissue:
            group.is_dropped = True
            return
        self.counts["reissued"] += 1
        group.failures = {}
        group.attempt += 1
        group.acked -= {"reference"}

    def expected_named(self, task, uids):
        """Return the groups that a lease of these prompts should return, or the error; stale ones are dropped."""
        known = {group.uid: group for group in self.groups}
        if len(set(uids)) < len(uids) or any(uid not in known for uid in uids):
            return DataError
        named = [known[uid] for uid in uids]
        if any(group not in self.possible(task) for group in named):
            return DataError
        stale = [group for group in named if self.is_ready(group, task) and self.is_stale(group, task)]
        for group in stale:
            self.take_out(group, "stale", reissue=False)
        if stale:
            return DataError
        return named if all(self.is_ready(group, task) for group in named) else DeadlineError

    def expected_lease(self, task, num_groups, allow_fewer):
        """Return the groups that a lease should return, or the error; stale ones are dropped."""
        while True:
            ready = [group for group in self.groups if self.is_ready(group, task)]
            is_last = allow_fewer and 0 < len(ready) == len(self.possible(task))
            picked, num_dropped = [], 0
            if len(ready) >= num_groups or is_last:
                for group in self.queue_of(task):
                    if len(picked) == num_groups or not self.is_ready(group, task):
                        break
                    if self.is_stale(group, task):
                        self.take_out(group, "stale", reissue=False)
                        num_dropped += 1
                        continue
                    picked.append(group)
            if picked and (len(picked) == num_groups or (allow_fewer and len(picked) == len(self.possible(task)))):
                return picked
            if not self.possible(task):
                return NothingToLeaseError
            if not num_dropped:
                return DeadlineError
