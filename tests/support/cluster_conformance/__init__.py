"""Checks of every placement of roles."""

from cluster_conformance.calls import CallChecks
from cluster_conformance.deaths import DeathChecks, RestartChecks
from cluster_conformance.life import CloseChecks, PoolChecks, StartChecks
from cluster_conformance.remote import BorderChecks, EndChecks
from cluster_conformance.stacks import BlockedStackChecks, StackChecks


class ClusterConformance(CallChecks, StartChecks, PoolChecks, CloseChecks, StackChecks):
    """Checks of every placement, including roles in this process; see `RemoteClusterConformance` for others."""


class RemoteClusterConformance(
    ClusterConformance, BorderChecks, EndChecks, DeathChecks, RestartChecks, BlockedStackChecks
):
    """`ClusterConformance` with checks for separate processes, which can die, print, restart or be interrupted.

    pytest runs it for each subclass that selects a cluster:

        class TestProcesses(RemoteClusterConformance):
            @classmethod
            def make_options(cls, **changes):
                return ClusterOptions(kind="process", **changes)
    """
