"""Coefficient of the KL to the reference: fixed, or adapted to keep the KL at a target.

Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from rl_core.errors import CheckpointError, SettingsError
from rl_distill.objectives.option_rules import check_fields, checked, number, whole_number

ERROR_BOUND = 0.2
"""Maximum relative error that one update takes into account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """A KL coefficient and its controller; immutable, so that a repeated step adapts only once.

    Attributes:
        coefficient: Current coefficient.
        target: Target KL, in nats per token; None leaves the coefficient fixed.
        horizon: Trajectories over which an error of 20 % changes the coefficient by 20 %.
    """

    coefficient: Annotated[float, number(at_least=0.0)]
    target: Annotated[float, number(above=0.0)] | None = None
    horizon: Annotated[int, whole_number(at_least=1)] = 10_000

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: The coefficient is below 0 or not finite, or an adaptive one is 0; the target is not above
                0; the horizon is below 1.
        """
        check_fields(self, owner="the KL control")
        if self.target is not None and self.coefficient == 0.0:
            raise SettingsError(
                "coefficient of the KL control must be above 0 if there is a target, since adapting multiplies it; "
                f"found 0 with target = {self.target}. Set a positive coefficient, or target = None."
            )

    @checked
    def adapted(self, kl: float, *, num_trajectories: Annotated[int, whole_number(at_least=0)]) -> "AdaptiveKL":
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
