"""Checks of starts, pools and ends."""

import asyncio

from cluster_conformance.checks import START_S, ClusterChecks, echo, within
from rl_core.cluster import Cluster, ResourcePool, RestartPolicy, RoleSpec
from rl_core.cluster.processes.guard import is_running
from rl_core.errors import DeadlineError, NotReadyError, SettingsError
from rl_core.testing.queue_checks import refuses

SLOWLY = "cluster_conformance.role:make_slowly"


class StartChecks(ClusterChecks):
    """A group starts completely or not at all."""

    def test_an_error_at_the_start_is_raised_as_it_was(self) -> None:
        with refuses(SettingsError, "no such model"):
            self.with_cluster(lambda cluster: cluster.start(echo(start_error="no such model"), deadline_s=START_S))

    def test_one_that_is_not_ready_ends_the_start_of_all(self) -> None:
        spec = RoleSpec(name="slow", factory=SLOWLY, kwargs={"hangs_on": 1})

        async def use(cluster: Cluster) -> None:
            words = ["slow[", "was not ready"]
            if self.make_options().kind != "ray":  # Ray may have no process by then
                words += ["slow[1]", f"{SLOWLY} was still running", "Raise the deadline"]
            with refuses(DeadlineError, *words):
                await cluster.start_group(spec, size=2, deadline_s=3.0)

        with within(30.0):
            self.with_cluster(use)

    def test_a_group_of_none_is_refused(self) -> None:
        with refuses(SettingsError, "'echo'", "size = 0"):
            self.with_cluster(lambda cluster: cluster.start_group(echo(), size=0, deadline_s=START_S))

    def test_impossible_policies_are_refused(self) -> None:
        with refuses(SettingsError, "'role', 'group'", "'node'"):
            RestartPolicy(scope="node")  # type: ignore[arg-type]
        with refuses(SettingsError, "max_restarts", "-1"):
            RestartPolicy(max_restarts=-1)


class PoolChecks(ClusterChecks):
    """Resources are checked before anything starts. The machine or Ray cluster has at least two CPUs."""

    def test_more_than_there_is_is_refused_at_once(self) -> None:
        async def use(cluster: Cluster) -> None:
            pool = ResourcePool(name="giants", size=2, cpus=10_000)
            with refuses(SettingsError, "'giants'", "2 slots of 10000 CPUs and 0 GPUs", " has ", "enough for 0"):
                await cluster.start_group(echo(), size=2, pool=pool, deadline_s=START_S)
            with refuses(SettingsError, "'echo (", "1 slots of 0 CPUs and 512 GPUs"):
                await cluster.start(echo(gpus=512), deadline_s=START_S)

        with within(NOW_S):
            self.run(use(self.shared))

    def test_a_role_that_fits_no_slot_is_refused_at_once(self) -> None:
        async def use(cluster: Cluster) -> None:
            pool = ResourcePool(name="halves", size=2, cpus=0.5)
            with refuses(SettingsError, "'echo' request 1 CPU", "'halves'", "2 slots of 0.5 CPUs", "enough for 0"):
                await cluster.start(echo(cpus=1), pool=pool, deadline_s=START_S)
            with refuses(SettingsError, "3 of role 'echo'", "'halves'", "enough for 2"):
                await cluster.start_group(echo(), size=3, pool=pool, deadline_s=START_S)

        self.run(use(self.shared))

    def test_a_pool_is_shared_by_its_name_and_waits_for_who_holds_it(self) -> None:
        async def use(cluster: Cluster) -> None:
            pool = ResourcePool(name="shared", size=1, cpus=0.5)
            first = await cluster.start(echo(cpus=0.25), pool=pool, deadline_s=START_S)
            second = await cluster.start(echo(cpus=0.25), pool=pool, deadline_s=START_S)
            with refuses(SettingsError, "pool name 'shared' is used twice"):
                await cluster.start(echo(), pool=ResourcePool(name="shared", size=2), deadline_s=START_S)
            with refuses(DeadlineError, "'echo'", "0.25 CPUs", "'shared'", "with 0 CPUs and 0 GPUs free"):
                await cluster.start(echo(cpus=0.25), pool=pool, deadline_s=0.2)
            waiting = asyncio.ensure_future(cluster.start(echo(cpus=0.25), pool=pool, deadline_s=START_S))
            await first.close()
            third = await waiting
            assert [await role.call("greet", "you") for role in (second, third)] == ["hello you!"] * 2

        self.with_cluster(use)

    def test_taken_resources_are_waited_for_until_the_deadline(self) -> None:
        async def use(cluster: Cluster) -> None:
            most = ResourcePool(name="most", size=1, cpus=1.75)
            held = [await cluster.start(echo(cpus=0.01), pool=most, deadline_s=START_S)]
            while True:  # until all CPUs are held
                rest = ResourcePool(name=f"rest{len(held)}", size=1, cpus=1.75)
                try:
                    held.append(await cluster.start(echo(cpus=0.01), pool=rest, deadline_s=0.5))
                except DeadlineError:
                    break
            with refuses(DeadlineError, f"'{rest.name}'", "1 slots of 1.75 CPUs", " has ", "free: "):
                await cluster.start(echo(cpus=0.01), pool=rest, deadline_s=0.1)
            for role in held:
                await role.close()
            await (await cluster.start(echo(cpus=0.01), pool=rest, deadline_s=START_S)).close()

        self.with_cluster(use)


NOW_S = 2.0
"""A role without processes or waiting."""


class CloseChecks(ClusterChecks):
    """Everything ends in order, and waiting callers get an error."""

    def test_close_closes_the_objects_and_can_be_called_twice(self) -> None:
        async def use(cluster: Cluster) -> list[int]:
            spec = echo(factory="cluster_conformance.role:AsyncEchoRole", close_file=self.folder / "closed")
            group = await cluster.start_group(spec, size=2, deadline_s=START_S)
            pids = [role.pid for role in group]
            waiting = asyncio.ensure_future(group[0].call("wait_forever"))
            await group[0].call("greet", "you")
            await asyncio.gather(group.close(), group.close())
            assert not any(role.is_alive for role in group)
            for call in (waiting, group.call_all("greet", "you")):
                with refuses(NotReadyError, "echo[", "was closed"):
                    await call
            await group.close()
            return pids

        pids = self.with_cluster(use)
        assert [(self.folder / f"closed.{rank}").read_text() for rank in range(2)] == ["closed"] * 2
        assert self.make_options().kind == "inline" or not any(is_running(pid) for pid in pids)

    def test_a_role_that_fails_to_close_keeps_no_other(self) -> None:
        bad = RoleSpec(name="bad", factory="cluster_conformance.role:BadCloseRole")

        async def use(cluster: Cluster) -> None:
            good = await cluster.start(echo(close_file=self.folder / "closed"), deadline_s=START_S)
            await cluster.start(bad, deadline_s=START_S)
            if self.make_options().kind == "inline":
                with refuses(RuntimeError, "close failed"):
                    await cluster.close()
            await cluster.close()  # in other placements, the error is in the role's output
            assert not good.is_alive
            with refuses(NotReadyError, "the cluster is closed"):
                await cluster.start(bad, deadline_s=START_S)

        self.with_cluster(use)
        assert (self.folder / "closed.0").exists()
