"""Roles in this process: the conformance suite, and specific checks."""

import asyncio

from cluster_conformance import ClusterConformance

from rl_core.cluster import ClusterOptions, RoleSpec, open_cluster


class TestInline(ClusterConformance):
    @classmethod
    def make_options(cls, **changes):
        return ClusterOptions(kind="inline", **changes)


class Sleeper:
    """A role whose close never returns."""

    async def close(self):
        await asyncio.Event().wait()


def test_a_close_that_does_not_end_is_given_up_after_its_deadline():
    async def run():
        cluster = open_cluster(ClusterOptions(kind="inline", close_deadline_s=0.1))
        role = await cluster.start(RoleSpec(name="sleeper", factory=f"{__name__}:Sleeper"), deadline_s=60)
        await asyncio.wait_for(cluster.close(), 30)
        assert not role.is_alive

    asyncio.run(run())
