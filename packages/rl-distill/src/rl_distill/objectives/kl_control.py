"""The coefficient of the KL to the reference: fixed, or adapted to hold the KL at a target.

Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl_core.errors import CheckpointError, SettingsError

ERROR_BOUND = 0.2
"""The relative error counts at most this much in one update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """A KL coefficient and how it goes on; immutable, so that a step that is repeated adapts once.

    Attributes:
        coefficient: The present one.
        target: KL to hold, in nats a token; None leaves the coefficient fixed.
        horizon: Trajectories over which an error of 20 % changes the coefficient by 20 %.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            SettingsError: The coefficient is below 0 or not finite, or an adaptive one is 0; the target is not above
                0; the horizon is below 1.
        """
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0.0):
            raise SettingsError(f"a KL coefficient must be at least 0; found {self.coefficient}.")
        if self.target is None:
            return
        if not self.target > 0.0 or self.horizon < 1 or not self.coefficient > 0.0:
            raise SettingsError(
                "an adaptive KL coefficient needs target > 0, horizon >= 1, and a start above 0, since it is changed "
                f"by factors; found target {self.target}, horizon {self.horizon}, coefficient {self.coefficient}."
            )

    def adapted(self, kl: float, *, num_trajectories: int) -> "AdaptiveKL":
        """The control after a batch.

        Args:
            kl: Mean KL to the reference measured on the batch, in nats a token; one that is not finite changes
                nothing.
            num_trajectories: Of the batch.
        """
        if self.target is None or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -ERROR_BOUND), ERROR_BOUND)
        factor = 1.0 + error * min(num_trajectories / self.horizon, 1.0)
        return replace(self, coefficient=self.coefficient * factor)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coefficient": self.coefficient}

    def restored(self, state: Mapping[str, float]) -> "AdaptiveKL":
        """The control with the coefficient of a `state`; a fixed one keeps its own, which the user may have changed.

        Raises:
            CheckpointError: The state has no usable coefficient.
        """
        if self.target is None:
            return self
        found = state.get("coefficient")
        if not isinstance(found, int | float) or not (math.isfinite(found) and found > 0.0):
            raise CheckpointError(f"the state of an adaptive KL must have a coefficient above 0; found {dict(state)}.")
        return replace(self, coefficient=float(found))
