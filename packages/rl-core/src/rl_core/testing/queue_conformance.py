"""Conformance suite for backends of the transfer queue."""

from rl_core.testing.queue_calls import CallChecks
from rl_core.testing.queue_payload import PayloadChecks
from rl_core.testing.queue_waits import WaitChecks


class QueueBackendConformance(PayloadChecks, CallChecks, WaitChecks):
    """Tests the parts that differ between backends, which share the queue's client and service.

    These are the transport of requests, errors and rows, and the waking of waiters. pytest runs the suite for each
    subclass that defines `make_queue`. The backend must read lease times from the given `clock`, and read it in
    `stats`.

        class TestInProcessQueue(QueueBackendConformance):
            def make_queue(self, tasks, *, options, clock):
                return InProcessQueue(tasks, options=options, clock=clock)
    """
