"""Finds the fastest split of the GPUs, and a sufficient staleness."""

from collections.abc import Iterable, Sequence

from rl_core.errors import SettingsError
from rl_rollout.simulation.asynchronous import Schedule, simulate_async
from rl_rollout.simulation.engine import FOREVER
from rl_rollout.simulation.outcome import GpuSplit, SimulatedRun
from rl_rollout.simulation.workload import GroupLengths, Workload

MAX_SPLITS = 33
"""Maximum number of splits to compare, spread evenly. More splits would differ by less than 3 % of the GPUs."""
COARSE_SPLITS = 8
"""Number of splits to simulate before the search narrows around the best."""
SEARCH_VERSIONS = 3
"""Number of versions to measure while comparing splits. The fastest split is simulated again for all versions."""
ENOUGH = 1.01
"""Minimum ratio of step times that makes a higher staleness worthwhile."""


def splits(workload: Workload, gpus: int) -> list[GpuSplit]:
    """Return at most `MAX_SPLITS` splits, in order of rollout GPUs.

    Each has whole engines and a learner on a multiple of `gpus_multiple` GPUs.

    Raises:
        SettingsError: There is no such split.
    """
    size, multiple = workload.engine.gpus, workload.learner.gpus_multiple
    possible = [
        GpuSplit(rollout_gpus=rollout, train_gpus=gpus - rollout)
        for rollout in range(size, gpus, size)
        if (gpus - rollout) % multiple == 0
    ]
    if not possible:
        raise SettingsError(
            f"{gpus} GPUs cannot be split into engines of engine.gpus = {size} and a learner of a multiple of "
            f"learner.gpus_multiple = {multiple}. Use more GPUs, or lower these settings."
        )
    if len(possible) <= MAX_SPLITS:
        return possible
    return [possible[index * (len(possible) - 1) // (MAX_SPLITS - 1)] for index in range(MAX_SPLITS)]


def middle_split(workload: Workload, gpus: int) -> GpuSplit:
    """Return the split closest to halves, with the larger half for rollouts."""
    return min(splits(workload, gpus), key=lambda split: (abs(2 * split.rollout_gpus - gpus), -split.rollout_gpus))


def best_split(workload: Workload, gpus: int, schedule: Schedule, *, num_versions: int, seed: int) -> SimulatedRun:
    """Simulate splits, and return the fastest run.

    The search starts with evenly spaced splits and narrows around the best. A split is skipped if its lower bound, with
    the lengths of the first version, exceeds the best time so far.

    Raises:
        SettingsError: The GPUs cannot be split.
    """
    candidates, batch = splits(workload, gpus), workload.batch
    lengths = GroupLengths(workload.lengths, group_size=batch.group_size, seed=seed)
    num_trained = sum(map(lengths.num_tokens, range(batch.groups)))
    num_generated = num_trained - batch.groups * batch.group_size * workload.lengths.prompt_tokens
    num_updates = batch.groups // batch.mini_batch_groups
    step_s: dict[int, float] = {}

    def bound_s(index: int) -> float:
        split = candidates[index]
        generation_s = workload.engine.generation_seconds(num_generated, num_engines=split.num_engines(workload))
        training_s = workload.learner.updates_seconds(num_trained, num_updates=num_updates, gpus=split.train_gpus)
        return max(generation_s, training_s)

    def fastest(indices: Iterable[int]) -> int:
        for index in sorted(set(indices) - set(step_s), key=bound_s):
            if bound_s(index) < min(step_s.values(), default=FOREVER):
                few = min(num_versions, SEARCH_VERSIONS)
                run = simulate_async(workload, candidates[index], schedule, num_versions=few, seed=seed)
                step_s[index] = run.step_s
        return min(step_s, key=step_s.__getitem__)

    stride = max(1, len(candidates) // COARSE_SPLITS)
    best = fastest(range(0, len(candidates), stride))
    while stride > 1:
        stride //= 2
        best = fastest(index for index in (best - stride, best + stride) if 0 <= index < len(candidates))
    return simulate_async(workload, candidates[best], schedule, num_versions=num_versions, seed=seed)


def advise(sync: SimulatedRun, runs: Sequence[SimulatedRun]) -> str:
    """Recommend a split and a staleness for a number of GPUs, or the synchronous trainer.

    The runs are the best splits of several stalenesses. The recommended one has the lowest staleness that is within
    1 % of the fastest.
    """
    limit_s = ENOUGH * min(run.step_s for run in runs)
    chosen = min((run for run in runs if run.step_s <= limit_s), key=lambda run: run.max_staleness)
    speedup = sync.step_s / chosen.step_s
    gpus, rollout, train = sync.split.gpus, chosen.split.rollout_gpus, chosen.split.train_gpus
    if speedup <= 1:
        return (
            f"{gpus} GPUs: stay with the synchronous trainer; the best split, {rollout} for rollouts and {train} for "
            f"training, is {speedup:.2f} times as fast."
        )
    if chosen.max_staleness == max(run.max_staleness for run in runs):
        more = "higher staleness was not tried."
    else:
        more = f"higher staleness gains less than {100 * (ENOUGH - 1):.0f} %."
    return (
        f"{gpus} GPUs: {rollout} for rollouts, {train} for training, max_staleness {chosen.max_staleness}: "
        f"{speedup:.2f} times sync; {more}"
    )
