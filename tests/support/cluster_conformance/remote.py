"""Checks of data that crosses a role's process boundary, and of the end of that process."""

import asyncio
import os
import threading

from cluster_conformance.checks import START_S, ClusterChecks, catches, echo, until, within
from cluster_conformance.role import Unreadable
from rl_core.cluster import Cluster
from rl_core.cluster.processes.guard import is_running
from rl_core.errors import NotReadyError, RoleError
from rl_core.testing.queue_checks import refuses

GONE_S = 10.0
"""Deadline for a role that is killed because its close hangs: half of the default deadline of a close."""


class BorderChecks(ClusterChecks):
    """A value that cannot be sent fails only its call, by name; errors that only the role knows arrive as text."""

    def test_an_argument_that_cannot_be_pickled_fails_its_call_alone_by_name(self) -> None:
        with catches(RoleError) as caught:
            self.run(self.group[1].call("echo", {"rows": [threading.Lock()]}))
        assert (caught[0].role, caught[0].rank) == ("echo", 1)
        for word in ("'echo'", "echo[1]", "type _thread.lock", "cannot be pickled"):
            assert word in str(caught[0]), f"the message lacks {word}: {caught[0]}"
        with refuses(RoleError, "'echo'", "echo[0] to echo[2]", "type builtins.function", "<lambda>"):
            self.run(self.group.call_all("echo", lambda: 1))
        assert self.run(self.group[1].call("greet", "you")) == "hello you!"

    def test_an_argument_of_the_factory_that_cannot_be_pickled_is_named(self) -> None:
        async def use(cluster: Cluster) -> None:
            with refuses(RoleError, "its start", "echo[0]", "type _thread.lock"):
                await cluster.start(echo(greeting=threading.Lock()), deadline_s=START_S)

        self.with_cluster(use)

    def test_a_result_that_cannot_be_pickled_fails_its_call_alone_by_name(self) -> None:
        with catches(RoleError) as caught:
            self.run(self.group.call(2, "unpicklable"))
        assert (caught[0].role, caught[0].rank) == ("echo", 2)
        for word in ("the result of 'unpicklable'", "echo[2]", "type _thread.lock", "cannot be pickled"):
            assert word in str(caught[0]), f"the message lacks {word}: {caught[0]}"
        assert self.run(self.group[2].call("greet", "you")) == "hello you!"

    def test_what_cannot_be_read_fails_its_call_alone(self) -> None:
        with refuses(RoleError, "echo[0]", "'unreadable'", "cannot be read", "cannot be made again"):
            self.run(self.group[0].call("unreadable"))
        with refuses(ValueError, "cannot be made again"):
            self.run(self.group[0].call("echo", Unreadable()))
        assert self.run(self.group[0].call("greet", "you")) == "hello you!"

    def test_a_role_writes_files_as_private_as_those_of_its_caller(self) -> None:
        async def use(cluster: Cluster) -> None:
            before = os.umask(0o027)
            try:
                role = await cluster.start(echo(), deadline_s=START_S)
            finally:
                os.umask(before)
            assert await role.call("umask") == 0o027
            await role.close()

        self.with_cluster(use)

    def test_an_error_of_an_unknown_class_becomes_a_role_error(self) -> None:
        with refuses(RoleError, "echo[0] raised UnknownError: out of luck"):
            self.run(self.group[0].call("raise_error", "UnknownError", "out of luck"))
        with refuses(RoleError, "echo[0] raised CancelledError"):
            self.run(self.group[0].call("cancel"))
        with refuses(RoleError, "echo[0] raised GeneratorExit"):
            self.run(self.group[0].call("raise_error", "GeneratorExit"))

    def test_an_error_that_cannot_say_what_it_is_arrives(self) -> None:
        with refuses(RoleError, "echo[0] raised WordlessError", "its text is unavailable"):
            self.run(self.group[0].call("raise_error", "WordlessError", deadline_s=START_S))


class EndChecks(ClusterChecks):
    """Close leaves no process, even if the role does not answer."""

    def test_a_role_that_does_not_end_is_killed_with_all_that_it_started(self) -> None:
        async def use(cluster: Cluster) -> list[int]:
            role = await cluster.start(echo(), deadline_s=START_S)
            children = [await role.call("start_child", own_session=own) for own in (False, True)]
            blocked = asyncio.ensure_future(role.call("block", self.folder / "blocked"))
            await until((self.folder / "blocked").exists, "the role to block")
            with within(GONE_S):
                await role.close()
            with refuses(NotReadyError, "closed"):
                await blocked
            return [role.pid, *children]

        pids = self.with_cluster(use, close_deadline_s=0.2)
        assert [pid for pid in pids if is_running(pid)] == []

    def test_a_role_that_ends_properly_leaves_no_children(self) -> None:
        async def use(cluster: Cluster) -> list[int]:
            role = await cluster.start(echo(), deadline_s=START_S)
            return [await role.call("start_child", own_session=own) for own in (False, True)]

        assert [pid for pid in self.with_cluster(use) if is_running(pid)] == []
