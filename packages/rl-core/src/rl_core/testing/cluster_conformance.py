"""What every placement of roles must do."""

from rl_core.testing.cluster_calls import CallChecks
from rl_core.testing.cluster_deaths import DeathChecks, RestartChecks
from rl_core.testing.cluster_life import CloseChecks, PoolChecks, StartChecks


class ClusterConformance(CallChecks, StartChecks, PoolChecks, CloseChecks, DeathChecks, RestartChecks):
    """The conformance suite; pytest runs it for each subclass that says which cluster is meant.

    Roles in this process leave out what needs a process that can die, print, be restarted or be interrupted alone:
    those checks are skipped with that reason.

        class TestProcesses(ClusterConformance):
            @classmethod
            def make_options(cls, **changes):
                return ClusterOptions(kind="process", **changes)
    """
