"""What every backend of the transfer queue must do."""

from rl_core.testing.queue_calls import CallChecks
from rl_core.testing.queue_capacity import CapacityChecks
from rl_core.testing.queue_claims import ClaimChecks
from rl_core.testing.queue_columns import ColumnChecks
from rl_core.testing.queue_leases import LeaseChecks
from rl_core.testing.queue_names import NameChecks
from rl_core.testing.queue_payload import PayloadChecks
from rl_core.testing.queue_sessions import SessionChecks
from rl_core.testing.queue_staleness import StalenessChecks
from rl_core.testing.queue_waits import WaitChecks


class QueueBackendConformance(PayloadChecks, CallChecks, WaitChecks):
    """The part that a backend can get wrong though it shares the queue's client and service with the others.

    That is how requests, errors and rows travel, and who is woken. A backend of `rl_core.queue.client.QueueClient` and
    `rl_core.queue.service.QueueService` needs no more: what a lease means is theirs.
    """


class QueueConformance(
    QueueBackendConformance,
    SessionChecks,
    ColumnChecks,
    LeaseChecks,
    NameChecks,
    ClaimChecks,
    StalenessChecks,
    CapacityChecks,
):
    """The whole suite; pytest runs it for each subclass that says how a queue is made.

    The backend must read the time of its leases from the `clock` that it is given, and look at it in `stats`.

        class TestInProcessQueue(QueueConformance):
            def make_queue(self, tasks, *, options, clock):
                return InProcessQueue(tasks, options=options, clock=clock)
    """
