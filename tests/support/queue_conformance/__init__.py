"""Checks of every transfer queue: the behaviour of client and service, which all backends share."""

from queue_conformance.calls import CallChecks
from queue_conformance.capacity import CapacityChecks
from queue_conformance.claims import ClaimChecks
from queue_conformance.columns import ColumnChecks
from queue_conformance.leases import LeaseChecks
from queue_conformance.names import NameChecks
from queue_conformance.rows import RowChecks
from queue_conformance.sessions import SessionChecks
from queue_conformance.staleness import StalenessChecks
from rl_core.testing import QueueBackendConformance


class QueueConformance(
    QueueBackendConformance,
    CallChecks,
    RowChecks,
    SessionChecks,
    ColumnChecks,
    LeaseChecks,
    NameChecks,
    ClaimChecks,
    StalenessChecks,
    CapacityChecks,
):
    """The whole suite; pytest runs it for each subclass that creates a queue."""
