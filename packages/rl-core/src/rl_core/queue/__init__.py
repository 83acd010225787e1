"""The transfer queue: one interface, several backends."""

from rl_core.queue.in_process import InProcessQueue
from rl_core.queue.interface import Lease, LedgerEntry, TaskSpec, TransferQueue

__all__ = ["InProcessQueue", "Lease", "LedgerEntry", "TaskSpec", "TransferQueue"]
