"""Protocol and data transfer: records, batches, the transfer queue, weights with proof, roles."""

from rl_core.cluster import BlockingGroup, ClusterOptions, ResourcePool, RoleSpec, open_cluster
from rl_core.data.batch import Batch
from rl_core.data.columns import COLUMNS, ColumnSpec
from rl_core.data.ragged import Ragged
from rl_core.data.records import Prompt, Timings, Trajectory
from rl_core.data.row_keys import RowKey
from rl_core.errors import RLError
from rl_core.queue import (
    Claim,
    InProcessQueue,
    Lease,
    QueueOptions,
    RayQueue,
    SharedMemoryQueue,
    TaskSpec,
    TransferQueue,
)
from rl_core.weights.update import Canary, WeightReceipt, WeightUpdate

__all__ = [
    "COLUMNS",
    "Batch",
    "BlockingGroup",
    "Canary",
    "Claim",
    "ClusterOptions",
    "ColumnSpec",
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
    "Timings",
    "Trajectory",
    "TransferQueue",
    "WeightReceipt",
    "WeightUpdate",
    "open_cluster",
]
