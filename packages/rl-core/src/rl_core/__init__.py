"""Data protocol and transfer: records, batches, the transfer queue, verified weight updates, and roles."""

from rl_core.cluster import BlockingGroup, ClusterOptions, ResourcePool, RoleSpec, open_cluster
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.records import Prompt, Trajectory
from rl_core.data.row_keys import RowKey
from rl_core.errors import RLError
from rl_core.queue import InProcessQueue, Lease, QueueOptions, RayQueue, SharedMemoryQueue, TaskSpec, TransferQueue

__all__ = [
    "Batch",
    "BlockingGroup",
    "ClusterOptions",
    "InProcessQueue",
    "Lease",
    "Prompt",
    "QueueOptions",
    "RLError",
    "Ragged",
    "RayQueue",
    "ResourcePool",
    "RoleSpec",
    "RowKey",
    "SharedMemoryQueue",
    "TaskSpec",
    "Trajectory",
    "TransferQueue",
    "open_cluster",
]
