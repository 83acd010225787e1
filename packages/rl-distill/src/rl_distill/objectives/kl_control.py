"""Coefficient of the KL to the reference: fixed, or adapted to keep the KL at a target.

Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from rl_core.errors import CheckpointError, SettingsError
from rl_core.record_fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    converts_arguments,
    settings_record,
)

ERROR_BOUND = 0.2
"""Maximum relative error that one update takes into account."""


@settings_record
class AdaptiveKL:
    """A KL coefficient and its controller; immutable, so that a repeated step adapts only once.

    Attributes:
        coefficient: Current coefficient.
        target: Target KL, in nats per token; None leaves the coefficient fixed.
        horizon: Trajectories over which an error of 20 % changes the coefficient by 20 %.
    """

    coefficient: NonNegativeFloat
    target: PositiveFloat | None = None
    horizon: PositiveInt = 10_000

    def __post_init__(self) -> None:
        """Check that there is something to adapt.

        Raises:
            SettingsError: The coefficient is 0, and there is a target.
        """
        if self.target is not None and self.coefficient == 0.0:
            raise SettingsError(
                "coefficient of the KL control must be above 0 if there is a target, since adapting multiplies it; "
                f"found 0 with target = {self.target}. Set a positive coefficient, or target = None."
            )

    @converts_arguments
    def adapted(self, kl: float, *, num_trajectories: NonNegativeInt) -> "AdaptiveKL":
        """Return the controller after a batch.

        Args:
            kl: Mean KL to the reference on the batch, in nats per token; a non-finite value changes nothing.
            num_trajectories: Number of trajectories in the batch.

        Raises:
            SettingsError: num_trajectories is below 0.
        """
        if self.target is None or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -ERROR_BOUND), ERROR_BOUND)
        factor = 1.0 + error * min(num_trajectories / self.horizon, 1.0)
        return replace(self, coefficient=self.coefficient * factor)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"coefficient": self.coefficient}

    def restored(self, state: Mapping[str, float]) -> "AdaptiveKL":
        """Restore the coefficient from a `state`; a fixed coefficient is kept, so that the user's settings apply.

        Raises:
            CheckpointError: The state has no usable coefficient.
        """
        if self.target is None:
            return self
        found = state.get("coefficient")
        if not isinstance(found, int | float) or not (math.isfinite(found) and found > 0.0):
            raise CheckpointError(f"the state of an adaptive KL must have a coefficient above 0; found {dict(state)}.")
        return replace(self, coefficient=float(found))
