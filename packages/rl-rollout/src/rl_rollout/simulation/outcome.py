"""Outcome of a simulated run: its times, and a lower bound for any schedule."""

from collections.abc import Iterable
from dataclasses import dataclass

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.simulation.lengths import GroupLengths
from rl_rollout.simulation.workload import Workload


@settings_record
class Cluster:
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
class Outcome:
    """Outcome of one simulated run. Times are per version, which trains as many groups as a synchronous step.

    Attributes:
        mode: sync, stream (staleness 0), whole or partial.
        cluster: GPUs of the run.
        max_staleness: Maximum staleness, in versions.
        sync_every: Learner steps per version.
        step_s: Seconds per version, mean of the measured versions.
        gen_s: Seconds per version in which the learner waited for rollouts; in a synchronous step, seconds of
            generation.
        logprobs_s: Seconds per version of recomputing logprobs.
        update_s: Seconds per version of optimizer updates.
        idle_learner: Share of the measured time in which the learner waited for rollouts or, if colocated, did not
            train.
        idle_engines: Share of the engines' measured time in which they did not generate.
        mean_staleness: Mean staleness of trained groups: versions since their oldest token was sampled.
        max_seen_staleness: Maximum staleness of trained groups.
        partial_share: Share of trained responses with tokens of more than one version.
        wall_s: Seconds from the start to the end of training of the last measured version.
        bound_s: Lower bound of `wall_s` for any schedule with the same work and GPUs.
        num_versions: Number of versions in `wall_s`.
    """

    mode: str
    cluster: Cluster
    max_staleness: int
    sync_every: int
    step_s: float
    gen_s: float
    logprobs_s: float
    update_s: float
    idle_learner: float
    idle_engines: float
    mean_staleness: float
    max_seen_staleness: int
    partial_share: float
    wall_s: float
    bound_s: float
    num_versions: int

    @property
    def share_of_bound(self) -> float:
        """Ratio of the bound to the run's time; 1 if no schedule could be faster."""
        return self.bound_s / self.wall_s


def generation_seconds(workload: Workload, num_tokens: int, *, num_engines: int) -> float:
    """Return the minimum seconds to decode this many tokens, with all engines at their best batch size all the time."""
    rates = [batch / seconds for batch, seconds in enumerate(workload.engine.step_seconds())]
    return num_tokens / (max(rates) * num_engines)


def fill_seconds(workload: Workload, lengths: GroupLengths, *, groups: int, num_groups: int) -> float:
    """Return the minimum seconds until a first step has its groups: the shortest of num_groups, each decoded alone."""
    alone = workload.engine.step_seconds()[1]
    longest = sorted(max(lengths[group]) for group in range(num_groups))
    return longest[groups - 1] * alone


def bound_seconds(fill_s: float, *, generation_s: float, training_s: float, last_step_s: float) -> float:
    """Return the minimum seconds of any schedule.

    The learner cannot train before the fill, and the engines must generate everything before the last step.
    """
    return max(fill_s + training_s, generation_s + last_step_s)


def total_response_tokens(lengths: GroupLengths, groups: Iterable[int]) -> int:
    """Return the number of response tokens of these groups."""
    return sum(sum(lengths[group]) for group in groups)
