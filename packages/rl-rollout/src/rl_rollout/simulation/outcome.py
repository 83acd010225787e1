"""A simulated run: its times, and a lower bound for any schedule."""

from dataclasses import asdict, dataclass
from typing import Any

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.simulation.workload import Workload


@settings_record
class GpuSplit:
    """Numbers of GPUs for rollouts and training.

    Attributes:
        rollout_gpus: Number of GPUs that generate.
        train_gpus: Number of GPUs that train.
        is_colocated: True if the same GPUs generate and train in turns. Both numbers are then the total.
    """

    rollout_gpus: int
    train_gpus: int
    is_colocated: bool = False

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return self.rollout_gpus if self.is_colocated else self.rollout_gpus + self.train_gpus

    def __str__(self) -> str:
        return "shared" if self.is_colocated else f"{self.rollout_gpus}:{self.train_gpus}"

    def num_engines(self, workload: Workload) -> int:
        """Return the number of engines on the rollout GPUs.

        Raises:
            SettingsError: The rollout GPUs are not a multiple of an engine's GPUs, or there are no GPUs to generate or
                to train.
        """
        size = workload.engine.gpus
        if self.rollout_gpus < size or self.rollout_gpus % size:
            raise SettingsError(
                f"GPUs for rollouts must be a multiple of engine.gpus = {size}, and at least one engine; found "
                f"{self.rollout_gpus}."
            )
        if self.train_gpus < 1:
            raise SettingsError(f"at least one GPU must train; found {self.rollout_gpus}:{self.train_gpus}.")
        return self.rollout_gpus // size


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """One simulated run. Times are per version, which trains as many groups as a synchronous step.

    Attributes:
        mode: sync, stream (staleness 0), whole or partial.
        split: GPUs of the run.
        max_staleness: Maximum staleness, in versions.
        sync_every: Learner steps per version.
        step_s: Seconds per version, mean of the measured versions.
        gen_s: Seconds per version in which the learner waited for rollouts; in a synchronous step, seconds of
            generation.
        logprobs_s: Seconds per version of recomputing logprobs.
        update_s: Seconds per version of optimizer updates.
        idle_learner: Share of the measured time in which the learner waited for rollouts or, if colocated, did not
            train.
        idle_engine: Share of the engines' measured time in which they did not generate.
        staleness_mean: Mean staleness of trained groups: versions since their oldest token was sampled.
        staleness_max: Maximum staleness of trained groups.
        partial_ratio: Share of trained responses with tokens of more than one version.
        wall_s: Seconds from the start to the end of training of the last measured version.
        bound_s: Lower bound of `wall_s` for any schedule with the same work and GPUs.
        versions: Number of versions in `wall_s`.
    """

    mode: str
    split: GpuSplit
    max_staleness: int = 0
    sync_every: int = 1
    step_s: float
    gen_s: float
    logprobs_s: float
    update_s: float
    idle_learner: float
    idle_engine: float
    staleness_mean: float = 0.0
    staleness_max: int = 0
    partial_ratio: float = 0.0
    wall_s: float
    bound_s: float
    versions: int

    @property
    def share_of_bound(self) -> float:
        """Ratio of the bound to the run's time; 1 if no schedule could be faster."""
        return self.bound_s / self.wall_s

    def record(self, *, sync_step_s: float) -> dict[str, Any]:
        """Return the run as JSON, with the speed-up over a synchronous step on as many GPUs."""
        fields = asdict(self)
        split = fields.pop("split")
        del split["is_colocated"]
        derived = {"gpus": self.split.gpus, "speedup": sync_step_s / self.step_s, "share_of_bound": self.share_of_bound}
        return {**fields, **split, **derived}
