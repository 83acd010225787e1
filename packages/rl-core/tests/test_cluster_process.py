"""Roles in processes of this machine: the conformance suite."""

from cluster_conformance import RemoteClusterConformance

from rl_core.cluster import ClusterOptions


class TestProcess(RemoteClusterConformance):
    @classmethod
    def make_options(cls, **changes):
        return ClusterOptions(kind="process", **changes)
