"""The trainer's schedule on a virtual clock: the real `Scheduler`, with simulated engines and a simulated learner."""

from rl_rollout.simulation.asynchronous import Policy, simulate_async
from rl_rollout.simulation.lengths import GroupLengths
from rl_rollout.simulation.measured import MEASURED_METRICS, measure_workload
from rl_rollout.simulation.outcome import Cluster, Outcome
from rl_rollout.simulation.published import PublishedRow, compare_published, published_rows, simulate_row
from rl_rollout.simulation.reading import built_in_workload, parse_workload, read_workload
from rl_rollout.simulation.report import outcome_record, outcome_table, published_record, published_table, sync_steps
from rl_rollout.simulation.search import advise, best_split, middle_split
from rl_rollout.simulation.synchronous import simulate_sync
from rl_rollout.simulation.workload import Workload

__all__ = [
    "MEASURED_METRICS",
    "Cluster",
    "GroupLengths",
    "Outcome",
    "Policy",
    "PublishedRow",
    "Workload",
    "advise",
    "best_split",
    "built_in_workload",
    "compare_published",
    "measure_workload",
    "middle_split",
    "outcome_record",
    "outcome_table",
    "parse_workload",
    "published_record",
    "published_rows",
    "published_table",
    "read_workload",
    "simulate_async",
    "simulate_row",
    "simulate_sync",
    "sync_steps",
]
