"""What every placement of roles must do."""

from cluster_conformance.calls import CallChecks
from cluster_conformance.deaths import DeathChecks, RestartChecks
from cluster_conformance.life import CloseChecks, PoolChecks, StartChecks
from cluster_conformance.remote import BorderChecks, EndChecks
from cluster_conformance.stacks import BlockedStackChecks, StackChecks


class ClusterConformance(CallChecks, StartChecks, PoolChecks, CloseChecks, StackChecks):
    """What holds of every placement, also of roles in this process; for others, see `RemoteClusterConformance`."""


class RemoteClusterConformance(
    ClusterConformance, BorderChecks, EndChecks, DeathChecks, RestartChecks, BlockedStackChecks
):
    """The same, and what needs processes that can die, print, be restarted or be interrupted alone.

    pytest runs it for each subclass that says which cluster is meant:

        class TestProcesses(RemoteClusterConformance):
            @classmethod
            def make_options(cls, **changes):
                return ClusterOptions(kind="process", **changes)
    """
