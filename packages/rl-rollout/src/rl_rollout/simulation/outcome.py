"""The result of a simulated run: its times, and a lower bound for any schedule."""

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
        is_colocated: The same GPUs do both, in turns; then both numbers are all of them.
    """

    rollout_gpus: int
    train_gpus: int
    is_colocated: bool = False

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.rollout_gpus if self.is_colocated else self.rollout_gpus + self.train_gpus

    def num_engines(self, workload: Workload) -> int:
        """Engines on the GPUs that generate.

        Raises:
            SettingsError: They are not a multiple of an engine's, or none is left to generate or to train.
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
    """One simulated run. Times are of a version: as many groups as a synchronous step trains.

    Attributes:
        mode: sync, stream (staleness 0), whole or partial.
        cluster: Its GPUs.
        max_staleness: In versions.
        sync_every: Learner's steps of a version.
        step_s: Seconds of a version, mean of the measured ones.
        gen_s: Seconds of it in which the learner waited for rollouts; of a synchronous step, those of generation.
        logprobs_s: Seconds of it that recomputed logprobs.
        update_s: Seconds of it that updated.
        idle_learner: Share of the measured time in which the learner waited for rollouts, or generated in its place.
        idle_engines: Share of the engines' measured time in which they generated nothing.
        mean_staleness: Versions by which a trained group's oldest token was behind, mean.
        max_seen_staleness: The same, largest.
        partial_share: Of the trained responses, those with tokens of more than one version.
        wall_s: Seconds from the start until the last measured version was trained.
        bound_s: Seconds that no schedule can beat for the same work on the same GPUs.
        num_versions: Versions that `wall_s` counts.
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
        """1 where no schedule could be faster."""
        return self.bound_s / self.wall_s


def generation_seconds(workload: Workload, num_tokens: int, *, num_engines: int) -> float:
    """Least time in which engines can decode so many tokens: all of them at their best batch all the time."""
    rates = [batch / seconds for batch, seconds in enumerate(workload.engine.step_seconds())]
    return num_tokens / (max(rates) * num_engines)


def fill_seconds(workload: Workload, lengths: GroupLengths, *, groups: int, num_groups: int) -> float:
    """Least time until a first step's groups can be there, out of so many: the shortest ones, each decoded alone."""
    alone = workload.engine.step_seconds()[1]
    longest = sorted(max(lengths[group]) for group in range(num_groups))
    return longest[groups - 1] * alone


def bound_seconds(fill_s: float, *, generation_s: float, training_s: float, last_step_s: float) -> float:
    """No schedule ends sooner: the learner has to train all after the fill, the engines generate all before the end."""
    return max(fill_s + training_s, generation_s + last_step_s)


def total_response_tokens(lengths: GroupLengths, groups: Iterable[int]) -> int:
    """Tokens that were decoded for these groups."""
    return sum(sum(lengths[group]) for group in groups)
