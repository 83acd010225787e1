"""Checks of deaths: they are detected, named, explained, and followed by a restart if configured."""

import asyncio
import os
import signal

from cluster_conformance.checks import NOTICED_S, START_S, ClusterChecks, catches, death_of, echo, until, within
from rl_core.cluster import Cluster, Incarnation, RestartPolicy, Role
from rl_core.cluster.processes.guard import is_running
from rl_core.errors import RLError, RoleDiedError, RoleError
from rl_core.testing.queue_checks import refuses


class DeathChecks(ClusterChecks):
    """A killed role is named within seconds and leaves nothing behind."""

    def test_a_killed_rank_fails_all_by_its_own_name_though_its_peers_raise_first(self) -> None:
        async def use(cluster: Cluster) -> None:
            group = await cluster.start_group(echo(), size=2, deadline_s=START_S)
            with within(NOTICED_S), catches(RoleDiedError) as caught:
                await group.call_all("fail_with", 1, self.folder / "died")
            (found,) = caught
            assert (found.role, found.rank) == ("echo", 1)
            assert "echo[1]" in str(found)
            assert any("echo[0] also failed: RuntimeError: connection closed" in note for note in found.__notes__)
            assert (group[0].is_alive, group[1].is_alive, group.is_alive) == (True, False, False)
            with refuses(RoleDiedError, "echo[1] is dead"):
                await group.call(1, "greet", "you")
            assert await group.call(0, "greet", "you") == "hello you!"

        self.with_cluster(use)

    def test_a_death_is_noticed_though_nothing_is_called_and_its_children_end(self) -> None:
        heard: list[tuple[Role, RLError]] = []

        async def use(cluster: Cluster) -> None:
            role = await cluster.start(echo(rank=3), deadline_s=START_S)
            children = [await role.call("start_child", own_session=own) for own in (False, True)]
            await role.call("say", "almost out of memory")
            role.on_death(lambda *said: heard.append(said))
            os.kill(role.pid, signal.SIGKILL)
            with within(NOTICED_S):
                error = await death_of(role)
            for word in ("echo[3]", f"pid {role.pid}", "the answer of 'say'", "almost out of memory"):
                assert word in str(error), f"the message lacks {word}: {error}"
            assert not role.is_alive
            assert [(died.rank, told is error) for died, told in heard] == [(3, True)]
            await until(lambda: not any(map(is_running, children)), "its children to end")

        self.with_cluster(use)

    def test_a_role_that_ends_its_process_by_an_error_is_dead(self) -> None:
        async def use(cluster: Cluster) -> None:
            endings: list[tuple[str, list[int]]] = [("SystemExit", [3]), ("KeyboardInterrupt", [])]
            for number, (kind, args) in enumerate(endings):
                role = await cluster.start(echo(rank=number), deadline_s=START_S)
                with within(NOTICED_S), refuses(RoleDiedError, f"echo[{number}]", "during 'leave'", kind):
                    await role.call("leave", kind, *args)
                assert not role.is_alive

        self.with_cluster(use, log_directory=self.folder / "logs")

    def test_a_death_at_the_start_leaves_nothing(self) -> None:
        flag = self.folder / "flag"
        flag.write_text("die 1")

        async def use(cluster: Cluster) -> None:
            with refuses(RoleDiedError, "echo[1]", "during its start"):
                await cluster.start_group(echo(flag=flag), size=2, deadline_s=START_S)

        self.with_cluster(use)

    def test_each_role_has_a_log_and_its_last_lines_are_in_the_error(self) -> None:
        async def use(cluster: Cluster) -> list[int]:
            group = await cluster.start_group(echo(name="my engine"), size=2, deadline_s=START_S)
            await group.call_each("say", [("first words",), ("last words",)])
            with refuses(RoleDiedError, "my engine[1]", "last words"):
                await group.call(1, "kill")
            return [role.pid for role in group]

        pids = self.with_cluster(use, log_directory=self.folder / "logs")
        for rank, words in enumerate(["first words", "last words"]):
            lines = (self.folder / "logs" / f"my-engine-{rank}.log").read_text().splitlines()
            assert lines[0].startswith(f"=== my engine[{rank}] incarnation 1 pid {pids[rank]} ")
            assert words in lines[1:]


class RestartChecks(ClusterChecks):
    """Roles are restarted, set up before they serve, and a limited number of times."""

    def test_a_restarted_role_is_set_up_and_logs_go_on(self) -> None:
        restart = RestartPolicy(max_restarts=1, backoff_s=0.05)
        set_up: list[tuple[int, str]] = []

        async def work(role: Incarnation) -> None:
            set_up.append((role.number, str(role.death or "")))
            if role.number > 1:
                await role.methods().open()

        async def use(cluster: Cluster) -> None:
            group = await cluster.start_group(echo(restart=restart), size=2, deadline_s=START_S)
            pids = [role.pid for role in group]
            await group[1].set_up(work)
            lost = asyncio.ensure_future(group.call(1, "wait_forever"))
            await group.call(1, "greet", "you")
            os.kill(pids[1], signal.SIGKILL)
            with refuses(RoleDiedError, "echo[1]", "restart 1 of 1", "call again"):
                await lost
            assert await group.call(1, "wait_until_open") == 1  # waits until the restarted one is set up
            place = await group.call(1, "place")
            assert (group[1].incarnation, place.incarnation, group[0].incarnation) == (2, 2, 1)
            assert group[0].pid == pids[0]
            os.kill(group[1].pid, signal.SIGKILL)
            with refuses(RoleDiedError, "echo[1]", "was restarted 1 time"):
                await group.call(1, "wait_forever")
            assert not group[1].is_alive

        self.with_cluster(use, log_directory=self.folder / "logs")
        assert [number for number, _ in set_up] == [1, 2]
        assert "echo[1]" in set_up[1][1]
        text = (self.folder / "logs" / "echo-1.log").read_text()
        assert "echo[1] incarnation 1 pid" in text
        assert "echo[1] incarnation 2 pid" in text

    def test_a_group_is_restarted_whole(self) -> None:
        set_up: list[tuple[int, str]] = []

        async def work(role: Incarnation) -> None:
            set_up.append((role.number, await role.methods().greet("you")))

        restart = RestartPolicy(max_restarts=1, backoff_s=0.0, scope="group")

        async def use(cluster: Cluster) -> None:
            group = await cluster.start_group(echo(restart=restart), size=2, deadline_s=START_S)
            await asyncio.gather(*(role.set_up(work) for role in group))
            lost = asyncio.ensure_future(group.call(0, "wait_forever"))
            await group.call(0, "greet", "you")
            os.kill(group[1].pid, signal.SIGKILL)
            with refuses(RoleError, "echo[0] was ended because", "echo[1]", "restart 1 of 1"):
                await lost
            places = await group.call_all("place")
            assert [place.incarnation for place in places] == [2, 2]

        self.with_cluster(use)
        assert set_up == [(1, "hello you!")] * 2 + [(2, "hello you!")] * 2

    def test_what_dies_at_its_start_is_started_again_as_often_as_it_may(self) -> None:
        flag = self.folder / "flag"
        flag.write_text("die 1 1")
        restart = RestartPolicy(max_restarts=1, backoff_s=0.0)

        async def use(cluster: Cluster) -> None:
            group = await cluster.start_group(echo(flag=flag, restart=restart), size=2, deadline_s=START_S)
            assert await group.call_all("greet", "you") == ["hello you!"] * 2
            assert [role.incarnation for role in group] == [2, 2]
            flag.write_text("die 1")
            with refuses(RoleDiedError, "echo[1]", "during its start"):
                await cluster.start_group(echo(flag=flag, restart=restart), size=2, deadline_s=START_S)
            slow = RestartPolicy(max_restarts=1, backoff_s=60.0)
            with refuses(RoleDiedError, "echo[1]", "during its start"):  # instead of a missed deadline
                await cluster.start_group(echo(flag=flag, restart=slow), size=2, deadline_s=START_S / 2)

        self.with_cluster(use)

    def test_a_restart_that_fails_too_often_ends_with_the_last_error(self) -> None:
        flag = self.folder / "flag"
        restart = RestartPolicy(max_restarts=2, backoff_s=0.0)

        async def use(cluster: Cluster) -> None:
            role = await cluster.start(echo(flag=flag, restart=restart), deadline_s=START_S)
            flag.write_text("die 0")
            os.kill(role.pid, signal.SIGKILL)
            await death_of(role)
            with refuses(RoleDiedError, "echo[0] is dead", "during its start", "was restarted 2 times"):
                await role.call("greet", "you")

        self.with_cluster(use)

    def test_a_role_that_is_made_to_fail_is_started_again(self) -> None:
        async def use(cluster: Cluster) -> None:
            restart = RestartPolicy(max_restarts=1, backoff_s=0.0)
            role = await cluster.start(echo(restart=restart), deadline_s=START_S)
            lost = asyncio.ensure_future(role.call("wait_forever"))
            await role.call("greet", "you")
            os.kill(role.pid, signal.SIGSTOP)
            with within(START_S):  # Ray kills stopped processes slowly
                await role.fail("did not answer, and was killed")
            with refuses(RoleDiedError, "did not answer, and was killed"):
                await lost
            assert await role.call("greet", "you") == "hello you!"
            assert role.incarnation == 2

        self.with_cluster(use)

    def test_close_breaks_a_restart_off(self) -> None:
        async def use(cluster: Cluster) -> None:
            restart = RestartPolicy(max_restarts=1, backoff_s=60.0)
            role = await cluster.start(echo(restart=restart), deadline_s=START_S)
            os.kill(role.pid, signal.SIGKILL)
            await death_of(role)
            waiting = asyncio.ensure_future(role.call("greet", "you"))
            with within(NOTICED_S):
                await cluster.close()
            with refuses(RLError, "was closed"):
                await waiting

        self.with_cluster(use)
