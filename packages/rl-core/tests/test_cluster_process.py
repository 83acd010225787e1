"""Roles in processes of this machine: the conformance suite."""

from rl_core.cluster import ClusterOptions
from rl_core.testing import RemoteClusterConformance


class TestProcess(RemoteClusterConformance):
    @classmethod
    def make_options(cls, **changes):
        return ClusterOptions(kind="process", **changes)
