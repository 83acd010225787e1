"""Compares a published table with simulations of its rows."""

import tomllib
from dataclasses import dataclass, replace
from typing import Any

from rl_rollout.simulation.asynchronous import Policy, simulate_async
from rl_rollout.simulation.outcome import Cluster, Outcome
from rl_rollout.simulation.reading import SHIPPED, built_in_workload
from rl_rollout.simulation.synchronous import simulate_sync
from rl_rollout.simulation.workload import Workload

POLICIES = {
    "stream": Policy(max_staleness=0, sync_every=4),
    "partial": Policy(max_staleness=1, sync_every=4, partial_rollout=True),
}
"""Our settings for the published ones.

trigger_parameter_sync_step = 4 of require_batches x ppo_mini_batch_size = 128 prompts each is `sync_every` = 4 steps of
128 groups. staleness_threshold = 0.5 is half a version, and 1 is the smallest value that allows it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One row of the table.

    Attributes:
        mode: "sync", "stream" or "partial".
        cluster: GPUs of the run.
        step_s: Seconds of a step of 512 prompts, mean of 400 steps.
        gen_s: Seconds of generation, or in an asynchronous row of waiting for it.
        update_s: Seconds of updates.
        logprobs_s: Seconds of recomputing logprobs; 0 without them.
        total_s: Seconds after 100, 200, 300 and 400 steps.
        length_scale: Ratio of the run's response lengths to the workload's, fitted to synchronous rows.
    """

    mode: str
    cluster: Cluster
    step_s: float
    gen_s: float
    update_s: float
    logprobs_s: float
    total_s: tuple[float, ...]
    length_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """A published row and its simulation.

    Attributes:
        row: The row as published.
        outcome: Simulated outcome, with the row's length scale.
        speedup: Published speed-up over the synchronous row with as many GPUs.
        simulated_speedup: Simulated speed-up over the same row.
    """

    row: PublishedRow
    outcome: Outcome
    speedup: float
    simulated_speedup: float

    @property
    def error(self) -> float:
        """Relative error of the simulated speed-up."""
        return self.simulated_speedup / self.speedup - 1


def published_rows() -> list[PublishedRow]:
    """Return the rows of the table, in order."""
    table = tomllib.loads((SHIPPED / "published.toml").read_text(encoding="utf-8"))
    return [_row(row) for row in table["row"]]


def compare_published(*, num_versions: int, seed: int) -> list[ComparedRow]:
    """Simulate every row of the table, and compare the results."""
    workload = built_in_workload()
    rows = published_rows()
    outcomes = [simulate_row(workload, row, num_versions=num_versions, seed=seed) for row in rows]
    sync = {row.cluster.gpus: (row, outcome) for row, outcome in zip(rows, outcomes, strict=True) if row.mode == "sync"}
    found = []
    for row, outcome in zip(rows, outcomes, strict=True):
        base, base_outcome = sync[row.cluster.gpus]
        found.append(
            ComparedRow(
                row=row,
                outcome=outcome,
                speedup=base.step_s / row.step_s,
                simulated_speedup=base_outcome.step_s / outcome.step_s,
            )
        )
    return found


def simulate_row(workload: Workload, row: PublishedRow, *, num_versions: int, seed: int) -> Outcome:
    """Simulate a row with its GPUs, mode and response lengths."""
    scaled = replace(workload, lengths=replace(workload.lengths, scale=row.length_scale))
    if row.mode == "sync":
        return simulate_sync(scaled, gpus=row.cluster.gpus, num_steps=num_versions, seed=seed)
    return simulate_async(scaled, row.cluster, POLICIES[row.mode], num_versions=num_versions, seed=seed)


def _row(table: dict[str, Any]) -> PublishedRow:
    gpus = table["gpus"]
    if table["mode"] == "sync":
        cluster = Cluster(rollout_gpus=gpus, train_gpus=gpus, is_colocated=True)
    else:
        cluster = Cluster(rollout_gpus=table["rollout_gpus"], train_gpus=gpus - table["rollout_gpus"])
    return PublishedRow(
        mode=table["mode"],
        cluster=cluster,
        step_s=table["step_s"],
        gen_s=table["gen_s"],
        update_s=table["update_s"],
        logprobs_s=table.get("logprobs_s", 0.0),
        total_s=tuple(table["total_s"]),
        length_scale=table.get("length_scale", 1.0),
    )
