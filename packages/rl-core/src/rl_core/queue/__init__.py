"""The transfer queue: one interface, several backends."""

from rl_core.queue.in_process import InProcessQueue
from rl_core.queue.interface import Claim, Lease, LedgerEntry, QueueOptions, TaskSpec, TransferQueue, Unsettled

__all__ = [
    "Claim",
    "InProcessQueue",
    "Lease",
    "LedgerEntry",
    "QueueOptions",
    "TaskSpec",
    "TransferQueue",
    "Unsettled",
]
