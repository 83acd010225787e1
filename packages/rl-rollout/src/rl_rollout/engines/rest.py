"""Whether an engine sleeps, and whether it has weights."""

from typing import Literal

from rl_core.errors import EngineError
from rl_core.weights import WeightUpdate


class Rest:
    """The sleep of one engine; the next update of all weights brings what a deep one dropped.

    Attributes:
        is_asleep: Its memory is freed.
        lacks_weights: They were dropped, and not brought again.
    """

    def __init__(self) -> None:
        """Awake, with weights."""
        self.is_asleep = self.lacks_weights = False

    def begin(self, level: Literal[1, 2]) -> None:
        """Sleep; at level 2 without weights."""
        self.is_asleep, self.lacks_weights = True, self.lacks_weights or level == 2

    def check(self, update: WeightUpdate | None = None) -> None:
        """Refuse an update that it cannot take now; without one, any request."""
        if self.is_asleep:
            raise EngineError("the engine sleeps; wake it before it is asked.")
        if self.lacks_weights and (update is None or update.adapter is not None):
            what = "it cannot be asked" if update is None else "an adapter has no base"
            raise EngineError(
                f"the engine slept at level 2, which drops its weights, and {what}: publish all weights first, or let "
                "it sleep at level 1."
            )
