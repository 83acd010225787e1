"""What a rollouter did since it was last asked, as plain values."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.data import Trajectory
from rl_rollout.engines.engine_load import EngineLoad
from rl_rollout.rollout import GroupResult


@dataclass(slots=True, kw_only=True)
class RolloutWindow:
    """What happened between two looks.

    Attributes:
        loads: Of the engines at its begin, since they were started.
        began: When it began, on the monotonic clock.
        events: Each with its name as "event", for a run's log.
        groups: Those that settled, with the sessions that failed.
        trajectories: Of the groups that settled.
        took_s: Seconds of each group from its start to its last session.
        num_replayed: Groups that came from a skip cache.
        failed_sessions: Sessions that failed.
        refused_groups: Groups that a filter refused.
        made_up_groups: Groups that a filter would have refused, and that train all the same.
    """

    loads: Sequence[EngineLoad] = ()
    began: float = field(default_factory=time.monotonic)
    events: list[dict[str, Any]] = field(default_factory=list)
    groups: list[GroupResult] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    num_replayed: int = 0
    failed_sessions: int = 0
    refused_groups: int = 0
    made_up_groups: int = 0

    def say(self, event: str, /, **fields: Any) -> None:
        """Take an event."""
        self.events.append({"event": event, **fields})

    def add(self, group: GroupResult, *, took_s: float, is_refused: bool, is_replayed: bool) -> None:
        """Take a group that has settled."""
        self.took_s.append(took_s)
        self.groups.append(group)
        self.trajectories.extend(group.trajectories)
        self.num_replayed += int(is_replayed)
        self.failed_sessions += len(group.failures)
        self.refused_groups += int(is_refused)
