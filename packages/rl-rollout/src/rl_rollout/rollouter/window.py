"""The events of a rollouter since the last query, as plain values."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.data import Trajectory
from rl_rollout.engines.replicas.replica import EngineLoad
from rl_rollout.rollout import GroupResult


@dataclass(slots=True, kw_only=True)
class RolloutWindow:
    """The events between two queries.

    Attributes:
        loads: Total engine loads at the window's start.
        began: Start time, on the monotonic clock.
        events: Events for a run's log; each has its name as "event".
        groups: Settled groups, including failed sessions.
        trajectories: Trajectories of the settled groups.
        took_s: Seconds per group, from its start to the end of its last session.
        failed_sessions: Number of failed sessions.
        refused_groups: Number of groups that a filter refused.
        made_up_groups: Number of groups that train although a filter would have refused them.
    """

    loads: Sequence[EngineLoad] = ()
    began: float = field(default_factory=time.monotonic)
    events: list[dict[str, Any]] = field(default_factory=list)
    groups: list[GroupResult] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    failed_sessions: int = 0
    refused_groups: int = 0
    made_up_groups: int = 0

    @property
    def timed(self) -> list[Trajectory]:
        """Trajectories whose times count; see `GroupResult.timed`."""
        return [trajectory for group in self.groups for trajectory in group.timed]

    def say(self, event: str, /, **fields: Any) -> None:
        """Add an event."""
        self.events.append({"event": event, **fields})

    def add(self, group: GroupResult, *, took_s: float, is_refused: bool) -> None:
        """Add a settled group."""
        self.took_s.append(took_s)
        self.groups.append(group)
        self.trajectories.extend(group.trajectories)
        self.failed_sessions += len(group.failures)
        self.refused_groups += int(is_refused)
