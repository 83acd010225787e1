"""Compare verl's published table of its fully asynchronous trainer with simulations of its rows.

python examples/simulate/published.py --steps 12
"""

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.terminal_text import table_lines
from rl_rollout.simulation import (
    GpuSplit,
    Schedule,
    SimulatedRun,
    Workload,
    read_workload,
    simulate_async,
    simulate_sync,
)

TABLE = Path(__file__).with_name("tables") / "verl.toml"
SCHEDULES = {
    "stream": Schedule(max_staleness=0, sync_every=4),
    "partial": Schedule(max_staleness=1, sync_every=4, partial_rollout=True),
}
"""Our settings for the published ones.

trigger_parameter_sync_step = 4 of require_batches x ppo_mini_batch_size = 128 prompts each is `sync_every` = 4 steps of
128 groups. staleness_threshold = 0.5 is half a version, and 1 is the smallest value that allows it.
"""
COLUMNS = ("mode", "GPUs", "step s", "published", "error", "x sync", "published", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One row of the table.

    Attributes:
        mode: "sync", "stream" or "partial".
        split: GPUs of the run.
        step_s: Seconds of a step of 512 prompts, mean of 400 steps.
        gen_s: Seconds of generation, or in an asynchronous row of waiting for it.
        update_s: Seconds of updates.
        logprobs_s: Seconds of recomputing logprobs; 0 without them.
        total_s: Seconds after 100, 200, 300 and 400 steps.
        length_scale: Ratio of the run's response lengths to the workload's, fitted to synchronous rows.
    """

    mode: str
    split: GpuSplit
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
        run: The simulated run, with the row's length scale.
        speedup: Published speed-up over the synchronous row with as many GPUs.
        simulated_speedup: Simulated speed-up over the same row.
    """

    row: PublishedRow
    run: SimulatedRun
    speedup: float
    simulated_speedup: float

    @property
    def error(self) -> float:
        """Relative error of the simulated speed-up."""
        return self.simulated_speedup / self.speedup - 1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="versions simulated (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths (default: 0)")
    options = parser.parse_args()
    print(published_table(compare_published(num_versions=options.steps, seed=options.seed)))


def published_rows() -> list[PublishedRow]:
    """Return the rows of the table, in order."""
    return [_row(row) for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["row"]]


def compare_published(*, num_versions: int, seed: int) -> list[ComparedRow]:
    """Simulate every row of the table, and compare the results."""
    workload, rows = read_workload(), published_rows()
    runs = [simulate_row(workload, row, num_versions=num_versions, seed=seed) for row in rows]
    sync = {row.split.gpus: (row, run) for row, run in zip(rows, runs, strict=True) if row.mode == "sync"}
    return [
        ComparedRow(
            row=row,
            run=run,
            speedup=sync[row.split.gpus][0].step_s / row.step_s,
            simulated_speedup=sync[row.split.gpus][1].step_s / run.step_s,
        )
        for row, run in zip(rows, runs, strict=True)
    ]


def simulate_row(workload: Workload, row: PublishedRow, *, num_versions: int, seed: int) -> SimulatedRun:
    """Simulate a row with its GPUs, mode and response lengths."""
    scaled = replace(workload, lengths=replace(workload.lengths, scale=row.length_scale))
    if row.mode == "sync":
        return simulate_sync(scaled, gpus=row.split.gpus, num_steps=num_versions, seed=seed)
    return simulate_async(scaled, row.split, SCHEDULES[row.mode], num_versions=num_versions, seed=seed)


def published_table(rows: Sequence[ComparedRow]) -> str:
    """Return a table of simulated and published results."""
    cells = [
        (
            one.row.mode,
            str(one.run.split.gpus) if one.run.split.is_colocated else str(one.run.split),
            f"{one.run.step_s:.1f}",
            f"{one.row.step_s:.1f}",
            f"{100 * (one.run.step_s / one.row.step_s - 1):+.1f} %",
            f"{one.simulated_speedup:.2f}",
            f"{one.speedup:.2f}",
            f"{100 * one.error:+.1f} %",
        )
        for one in rows
    ]
    return "\n".join(table_lines(COLUMNS, cells, right=COLUMNS[1:]))


def _row(table: dict[str, Any]) -> PublishedRow:
    gpus = table["gpus"]
    if table["mode"] == "sync":
        split = GpuSplit(rollout_gpus=gpus, train_gpus=gpus, is_colocated=True)
    else:
        split = GpuSplit(rollout_gpus=table["rollout_gpus"], train_gpus=gpus - table["rollout_gpus"])
    return PublishedRow(
        mode=table["mode"],
        split=split,
        step_s=table["step_s"],
        gen_s=table["gen_s"],
        update_s=table["update_s"],
        logprobs_s=table.get("logprobs_s", 0.0),
        total_s=tuple(table["total_s"]),
        length_scale=table.get("length_scale", 1.0),
    )


if __name__ == "__main__":
    main()
