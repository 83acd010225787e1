"""Roles in this process: the conformance suite."""

from rl_core.cluster import ClusterOptions
from rl_core.testing import ClusterConformance


class TestInline(ClusterConformance):
    @classmethod
    def make_options(cls, **changes):
        return ClusterOptions(kind="inline", **changes)
