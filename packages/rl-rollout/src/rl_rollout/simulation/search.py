"""Finds the fastest split of the GPUs, and a sufficient staleness."""

from collections.abc import Iterable, Sequence

from rl_core.errors import SettingsError
from rl_rollout.simulation.asynchronous import Policy, simulate_async
from rl_rollout.simulation.engine import FOREVER
from rl_rollout.simulation.lengths import GroupLengths
from rl_rollout.simulation.outcome import Cluster, Outcome, generation_seconds, total_response_tokens
from rl_rollout.simulation.workload import Workload

MAX_SPLITS = 33
"""Maximum number of splits to compare, spread evenly. More splits would differ by less than 3 % of the GPUs."""
COARSE_SPLITS = 8
"""Number of splits to simulate before the search narrows around the best."""
SEARCH_VERSIONS = 3
"""Number of versions to measure while comparing splits. The fastest split is simulated again for all versions."""
ENOUGH = 1.01
"""Minimum ratio of step times that makes a higher staleness worthwhile."""


def splits(workload: Workload, gpus: int) -> list[Cluster]:
    """Return at most `MAX_SPLITS` splits, in order of rollout GPUs.

    Each has whole engines and a learner on a multiple of `gpus_multiple` GPUs.

    Raises:
        SettingsError: There is no such split.
    """
    size, multiple = workload.engine.gpus, workload.learner.gpus_multiple
    found = [
        Cluster(rollout_gpus=rollout, train_gpus=gpus - rollout)
        for rollout in range(size, gpus, size)
        if (gpus - rollout) % multiple == 0
    ]
    if not found:
        raise SettingsError(
            f"{gpus} GPUs cannot be split into engines of engine.gpus = {size} and a learner of a multiple of "
            f"learner.gpus_multiple = {multiple}. Use more GPUs, or lower these settings."
        )
    if len(found) <= MAX_SPLITS:
        return found
    return [found[index * (len(found) - 1) // (MAX_SPLITS - 1)] for index in range(MAX_SPLITS)]


def middle_split(workload: Workload, gpus: int) -> Cluster:
    """Return the split closest to halves, with the larger half for rollouts."""
    return min(
        splits(workload, gpus), key=lambda cluster: (abs(2 * cluster.rollout_gpus - gpus), -cluster.rollout_gpus)
    )


def best_split(workload: Workload, gpus: int, policy: Policy, *, num_versions: int, seed: int) -> Outcome:
    """Simulate splits, and return the outcome of the fastest.

    The search starts with evenly spaced splits and narrows around the best. Splits are skipped if their lower bound
    exceeds the best time so far.

    Raises:
        SettingsError: The GPUs cannot be split.
    """
    clusters = splits(workload, gpus)
    bounds = _bounds(workload, clusters, seed=seed)
    few = min(num_versions, SEARCH_VERSIONS)
    known: dict[int, float] = {}

    def look(indices: Iterable[int]) -> int:
        for index in sorted(set(indices), key=bounds.__getitem__):
            if index not in known and bounds[index] < min(known.values(), default=FOREVER):
                outcome = simulate_async(workload, clusters[index], policy, num_versions=few, seed=seed)
                known[index] = outcome.step_s
        return min(known, key=known.__getitem__)

    stride = max(1, len(clusters) // COARSE_SPLITS)
    best = look(range(0, len(clusters), stride))
    while stride > 1:
        stride //= 2
        best = look(index for index in (best - stride, best, best + stride) if 0 <= index < len(clusters))
    return simulate_async(workload, clusters[best], policy, num_versions=num_versions, seed=seed)


def advise(sync: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Recommend a split and a staleness for a number of GPUs, or the synchronous trainer.

    The outcomes are the best splits of several stalenesses. The recommended one has the lowest staleness that is within
    1 % of the fastest.
    """
    best = min(outcomes, key=lambda outcome: outcome.step_s)
    chosen = next(
        outcome
        for outcome in sorted(outcomes, key=lambda outcome: outcome.max_staleness)
        if outcome.step_s <= ENOUGH * best.step_s
    )
    speedup = sync.step_s / chosen.step_s
    gpus, rollout, train = sync.cluster.gpus, chosen.cluster.rollout_gpus, chosen.cluster.train_gpus
    if speedup <= 1:
        return (
            f"{gpus} GPUs: stay with the synchronous trainer; the best split, {rollout} for rollouts and {train} for "
            f"training, is {speedup:.2f} times as fast."
        )
    if chosen.max_staleness == max(outcome.max_staleness for outcome in outcomes):
        more = "higher staleness was not tried."
    else:
        more = f"higher staleness gains less than {100 * (ENOUGH - 1):.0f} %."
    return (
        f"{gpus} GPUs: {rollout} for rollouts, {train} for training, max_staleness {chosen.max_staleness}: "
        f"{speedup:.2f} times sync; {more}"
    )


def _bounds(workload: Workload, clusters: Sequence[Cluster], *, seed: int) -> list[float]:
    """Return a lower bound of the seconds per version on each split, with the lengths of the first version."""
    batch = workload.batch
    lengths = GroupLengths(workload.lengths, group_size=batch.group_size, seed=seed)
    one_engine_s = generation_seconds(workload, total_response_tokens(lengths, range(batch.groups)), num_engines=1)
    trained = sum(map(lengths.num_tokens, range(batch.groups)))
    updates = batch.groups // batch.mini_batch_groups
    return [
        max(
            one_engine_s / cluster.num_engines(workload),
            workload.learner.updates_seconds(trained, num_updates=updates, gpus=cluster.train_gpus),
        )
        for cluster in clusters
    ]
