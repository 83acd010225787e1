"""What every backend of the transfer queue must do."""

from rl_core.testing.queue_calls import CallChecks
from rl_core.testing.queue_payload import PayloadChecks
from rl_core.testing.queue_waits import WaitChecks


class QueueBackendConformance(PayloadChecks, CallChecks, WaitChecks):
    """The part that a backend can get wrong though it shares the queue's client and service with the others.

    That is how requests, errors and rows travel, and who is woken; what a lease means is theirs. pytest runs it for
    each subclass that says how a queue is made. The backend must read the time of its leases from the `clock` that it
    is given, and look at it in `stats`.

        class TestInProcessQueue(QueueBackendConformance):
            def make_queue(self, tasks, *, options, clock):
                return InProcessQueue(tasks, options=options, clock=clock)
    """
