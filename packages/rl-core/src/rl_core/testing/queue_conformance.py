"""What every backend of the transfer queue must do."""

from rl_core.testing.queue_batches import BatchChecks
from rl_core.testing.queue_claims import ClaimChecks
from rl_core.testing.queue_columns import ColumnChecks
from rl_core.testing.queue_drops import DropChecks
from rl_core.testing.queue_finish import FinishChecks
from rl_core.testing.queue_leases import LeaseChecks
from rl_core.testing.queue_ledger import LedgerChecks
from rl_core.testing.queue_named import NamedLeaseChecks
from rl_core.testing.queue_own_columns import OwnColumnChecks
from rl_core.testing.queue_partitions import PartitionChecks
from rl_core.testing.queue_room import RoomChecks
from rl_core.testing.queue_rows import RowChecks
from rl_core.testing.queue_staleness import StalenessChecks
from rl_core.testing.queue_waits import WaitChecks


class QueueConformance(
    RowChecks,
    BatchChecks,
    ColumnChecks,
    OwnColumnChecks,
    LeaseChecks,
    NamedLeaseChecks,
    FinishChecks,
    StalenessChecks,
    ClaimChecks,
    DropChecks,
    RoomChecks,
    WaitChecks,
    PartitionChecks,
    LedgerChecks,
):
    """The conformance suite; pytest runs it for each subclass that says how a queue is made.

    The backend must read the time of its leases from the `clock` that it is given, and look at it in `stats`.

        class TestInProcessQueue(QueueConformance):
            def make_queue(self, tasks, *, options, clock):
                return InProcessQueue(tasks, options=options, clock=clock)
    """
