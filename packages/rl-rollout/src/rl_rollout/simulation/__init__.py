"""The trainer's schedule on a virtual clock: the real `Scheduler`, with simulated engines and a simulated learner."""

from rl_rollout.simulation.asynchronous import Schedule, simulate_async
from rl_rollout.simulation.measured import measure_workload
from rl_rollout.simulation.outcome import GpuSplit, SimulatedRun
from rl_rollout.simulation.search import best_split, middle_split
from rl_rollout.simulation.synchronous import simulate_sync
from rl_rollout.simulation.workload import GroupLengths, Workload, read_workload, workload_from

__all__ = [
    "GpuSplit",
    "GroupLengths",
    "Schedule",
    "SimulatedRun",
    "Workload",
    "best_split",
    "measure_workload",
    "middle_split",
    "read_workload",
    "simulate_async",
    "simulate_sync",
    "workload_from",
]
