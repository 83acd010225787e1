"""Tracks whether an engine sleeps and whether it has weights."""

from typing import Literal

from rl_core.errors import EngineError
from rl_core.weights import WeightUpdate


class Rest:
    """Sleep state of one engine. After a level 2 sleep, the next update of all weights restores them.

    Attributes:
        is_asleep: Whether its memory is freed.
        lacks_weights: Whether its weights were dropped and not yet restored.
    """

    def __init__(self) -> None:
        """Start awake, with weights."""
        self.is_asleep = self.lacks_weights = False

    def begin(self, level: Literal[1, 2]) -> None:
        """Begin to sleep. Level 2 drops the weights."""
        self.is_asleep, self.lacks_weights = True, self.lacks_weights or level == 2

    def check(self, update: WeightUpdate | None = None) -> None:
        """Refuse an update that is impossible in this state. Without an update, refuse any request."""
        if self.is_asleep:
            raise EngineError("the engine is asleep; wake it first.")
        if self.lacks_weights and (update is None or update.adapter is not None):
            what = "it cannot serve requests" if update is None else "an adapter has no base"
            raise EngineError(
                f"the engine slept at level 2, which drops its weights, so {what}: publish all weights first, or use "
                "level 1."
            )
