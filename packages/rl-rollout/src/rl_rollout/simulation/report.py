"""Simulated runs as tables and as JSON."""

from collections.abc import Sequence
from typing import Any

from rl_core.terminal_text import table_lines
from rl_rollout.simulation.outcome import Outcome
from rl_rollout.simulation.published import ComparedRow

COLUMNS = (
    "mode",
    "GPUs",
    "split",
    "staleness",
    "step s",
    "x sync",
    "idle learner",
    "idle engines",
    "mean staleness",
    "of the bound",
)
PUBLISHED_COLUMNS = ("mode", "GPUs", "step s", "published", "error", "x sync", "published", "error")


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one row per run. Asynchronous runs are compared with the synchronous run on as many GPUs."""
    sync = sync_steps(outcomes)
    rows = [_cells(outcome, sync[outcome.cluster.gpus] / outcome.step_s) for outcome in outcomes]
    return _table(COLUMNS, rows)


def published_table(rows: Sequence[ComparedRow]) -> str:
    """Return a table of simulated and published results."""
    cells = [
        (
            compared.row.mode,
            split_name(compared.outcome),
            f"{compared.outcome.step_s:.1f}",
            f"{compared.row.step_s:.1f}",
            f"{100 * (compared.outcome.step_s / compared.row.step_s - 1):+.1f} %",
            f"{compared.simulated_speedup:.2f}",
            f"{compared.speedup:.2f}",
            f"{100 * compared.error:+.1f} %",
        )
        for compared in rows
    ]
    return _table(PUBLISHED_COLUMNS, cells)


def outcome_record(outcome: Outcome, *, sync_step_s: float) -> dict[str, Any]:
    """Return one run as JSON."""
    return {
        "mode": outcome.mode,
        "gpus": outcome.cluster.gpus,
        "rollout_gpus": outcome.cluster.rollout_gpus,
        "train_gpus": outcome.cluster.train_gpus,
        "max_staleness": outcome.max_staleness,
        "sync_every": outcome.sync_every,
        "step_s": outcome.step_s,
        "speedup": sync_step_s / outcome.step_s,
        "gen_s": outcome.gen_s,
        "logprobs_s": outcome.logprobs_s,
        "update_s": outcome.update_s,
        "idle_learner": outcome.idle_learner,
        "idle_engine": outcome.idle_engines,
        "staleness_mean": outcome.mean_staleness,
        "staleness_max": outcome.max_seen_staleness,
        "partial_ratio": outcome.partial_share,
        "wall_s": outcome.wall_s,
        "bound_s": outcome.bound_s,
        "share_of_bound": outcome.share_of_bound,
        "versions": outcome.num_versions,
    }


def published_record(compared: ComparedRow) -> dict[str, Any]:
    """Return one published row and its simulation as JSON."""
    row = compared.row
    return {
        **outcome_record(compared.outcome, sync_step_s=compared.simulated_speedup * compared.outcome.step_s),
        "published_step_s": row.step_s,
        "published_speedup": compared.speedup,
        "speedup_error": compared.error,
    }


def sync_steps(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Return the seconds of a synchronous step, by number of GPUs."""
    return {outcome.cluster.gpus: outcome.step_s for outcome in outcomes if outcome.mode == "sync"}


def split_name(outcome: Outcome) -> str:
    """Return rollout and training GPUs, such as 64:64, or the total if they are shared."""
    cluster = outcome.cluster
    return str(cluster.gpus) if cluster.is_colocated else f"{cluster.rollout_gpus}:{cluster.train_gpus}"


def _cells(outcome: Outcome, speedup: float) -> tuple[str, ...]:
    return (
        outcome.mode,
        str(outcome.cluster.gpus),
        "shared" if outcome.cluster.is_colocated else split_name(outcome),
        str(outcome.max_staleness),
        f"{outcome.step_s:.4g}",
        f"{speedup:.2f}",
        f"{100 * outcome.idle_learner:.1f} %",
        f"{100 * outcome.idle_engines:.1f} %",
        f"{outcome.mean_staleness:.2f}",
        f"{outcome.share_of_bound:.2f}",
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(table_lines(columns, rows, right=columns[1:]))
