"""The transfer queue: one interface with several backends."""

from rl_core.queue.client import TransferQueue
from rl_core.queue.in_process import InProcessQueue
from rl_core.queue.interface import Claim, Lease, LedgerEntry, QueueOptions, TaskSpec, Unsettled
from rl_core.queue.prometheus import prometheus_text
from rl_core.queue.ray.queue import RayQueue
from rl_core.queue.shared_memory.queue import SharedMemoryQueue

__all__ = [
    "Claim",
    "InProcessQueue",
    "Lease",
    "LedgerEntry",
    "QueueOptions",
    "RayQueue",
    "SharedMemoryQueue",
    "TaskSpec",
    "TransferQueue",
    "Unsettled",
    "prometheus_text",
]
