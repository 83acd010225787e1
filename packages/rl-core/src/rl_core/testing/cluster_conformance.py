"""What every placement of roles must do."""

from rl_core.testing.cluster_calls import CallChecks
from rl_core.testing.cluster_deaths import DeathChecks, RestartChecks
from rl_core.testing.cluster_life import CloseChecks, PoolChecks, StartChecks
from rl_core.testing.cluster_remote import BorderChecks, EndChecks
from rl_core.testing.cluster_stacks import BlockedStackChecks, StackChecks


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
