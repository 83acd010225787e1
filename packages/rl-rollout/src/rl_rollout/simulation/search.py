"""Splits of the GPUs, and the fastest of them."""

from rl_core.errors import SettingsError
from rl_rollout.simulation.asynchronous import Schedule, simulate_async
from rl_rollout.simulation.outcome import GpuSplit, SimulatedRun
from rl_rollout.simulation.workload import GroupLengths, Workload

MAX_SPLITS = 17
"""Maximum number of splits to compare, spread evenly. More splits would differ by less than 6 % of the GPUs."""


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

    Splits are simulated in order of their lower bounds, with the lengths of the first version, until the next bound
    exceeds the best time.

    Raises:
        SettingsError: The GPUs cannot be split.
    """
    batch, engine, learner = workload.batch, workload.engine, workload.learner
    lengths = GroupLengths(workload.lengths, group_size=batch.group_size, seed=seed)
    num_generated = sum(sum(lengths[group]) for group in range(batch.groups))
    num_trained = sum(map(lengths.num_tokens, range(batch.groups)))
    num_updates = batch.groups // batch.mini_batch_groups

    def bound_s(split: GpuSplit) -> float:
        return max(
            engine.generation_seconds(num_generated, num_engines=split.num_engines(workload)),
            learner.updates_seconds(num_trained, num_updates=num_updates, gpus=split.train_gpus),
        )

    runs: list[SimulatedRun] = []
    for split in sorted(splits(workload, gpus), key=bound_s):
        if runs and bound_s(split) >= min(run.step_s for run in runs):
            break
        runs.append(simulate_async(workload, split, schedule, num_versions=num_versions, seed=seed))
    return min(runs, key=lambda run: run.step_s)
