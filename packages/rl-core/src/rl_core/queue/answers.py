"""Answers of the queue's server: statistics and leases."""

from rl_core.queue.core import QueueCore, RunningLease
from rl_core.queue.interface import ROLLOUT_COLUMNS
from rl_core.queue.messages import GENERATE, Leased, LeasedGroup


def stats_of(core: QueueCore, *, now: float) -> dict[str, float]:
    """Return rows, bytes and groups by state, leases and their ages, and drops by reason."""
    stats: dict[str, float] = dict(core.groups.counts())
    leases = [lease for lease in core.leases.values() if lease.task.name != GENERATE]
    stats["rows"], stats["size_bytes"] = core.groups.num_rows, core.groups.size_bytes
    leased = {group.order: group for lease in leases for group in lease.groups}.values()
    stats["rows/leased"] = sum(group.num_rows for group in leased)
    stats["size_bytes/leased"] = sum(group.size_bytes for group in leased)
    stats["leases"], stats["claims"] = len(leases), len(core.leases) - len(leases)
    stats["oldest_lease_s"] = now - min((lease.leased_at for lease in leases), default=now)
    stats["oldest_issued_s"] = now - min((group.issued_at for group in core.groups.issued.values()), default=now)
    stats |= {name: core.counts[name] for name in ("leases_expired", "reissued")}
    stats |= {name: core.counts[name] for name in (f"acks/{task}" for task in core.specs)}
    stats |= {f"drops/{reason}": count for reason, count in sorted(core.drops.items())}
    return stats


def leased_of(core: QueueCore, lease: RunningLease) -> Leased:
    """Describe a lease to its consumer, or a claim to its producer."""
    if lease.task.name == GENERATE:
        claimed = [LeasedGroup(group.prompt, group.missing_sessions, [], []) for group in lease.groups]
        return Leased(lease.lease_id, lease.expires_at, claimed, [], {})
    groups = [
        LeasedGroup(
            group.prompt,
            [],
            [part[:3] for part in group.parts],
            [(part.segment, part.first, part.num_rows, list(part.columns)) for part in group.late],
        )
        for group in lease.groups
    ]
    numbers = {number for group in lease.groups for number in group.segments()}
    places = {number: core.segments.place(number) for number in numbers}
    return Leased(lease.lease_id, lease.expires_at, groups, sorted(_visible(core, lease)), places)


def _visible(core: QueueCore, lease: RunningLease) -> frozenset[str]:
    """Return the columns from rollouts and the late columns that the task needs.

    Groups can differ in the late columns that other tasks have added; a task sees only the ones it needs.
    """
    giving = (task.spec.gives for task in core.groups.tasks.values())
    late = frozenset().union(*giving) - ROLLOUT_COLUMNS
    common = frozenset.intersection(*(group.columns for group in lease.groups))
    return frozenset(name for name in common if name in lease.task.needs or name not in late)
