"""Groups that a filter refuses, up to a bound: a policy whose groups are all alike shall not generate for ever."""

from rl_async_trainer.rollout_window import RolloutWindow
from rl_async_trainer.settings import AsyncSettings
from rl_rollout.filters import GroupFilter, resolve_filter
from rl_rollout.rollout import GroupResult


class Refusals:
    """Filters groups, within as many rounds of a version's groups as `refill.max_rounds` allows.

    The synchronous trainer keeps what its last round brings, whatever the filter says of it. Here groups come one by
    one: once so many were refused under one policy version as the rounds before the last one have, the others train.
    """

    def __init__(self, settings: AsyncSettings, window: RolloutWindow) -> None:
        """Find the filter of the settings, if there is one; the window counts what trains all the same."""
        name = settings.refill.filter
        self._filter: GroupFilter | None = resolve_filter(name) if name else None
        self._most = (settings.refill.max_rounds - 1) * settings.schedule_options.groups_per_version
        self._num_refused = 0
        self._window = window

    def updated(self) -> None:
        """The engines have new weights: the rounds begin anew."""
        self._num_refused = 0

    def reason(self, group: GroupResult) -> str | None:
        """Why a group is refused; None where it trains."""
        if self._filter is None or not group.trajectories:
            return None
        reason = self._filter(group)
        if reason is None:
            return None
        if self._num_refused >= self._most:
            self._window.made_up += 1
            return None
        self._num_refused += 1
        return reason
