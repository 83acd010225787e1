"""Checks of stacks: the current activity of a role, even if it does not answer calls."""

import asyncio
import os
import signal

from cluster_conformance.checks import START_S, ClusterChecks, death_of, echo, until
from rl_core.cluster import Cluster, Role
from rl_core.cluster.stacks import is_silent

LONG_S = 60.0
"""Deadline for immediate answers, long enough for a busy machine."""
SHORT_S = 4.0
"""Deadline for missing answers; checks wait for half of it."""


class StackChecks(ClusterChecks):
    """The stack of an awaiting role shows where it waits."""

    def test_a_role_that_awaits_says_where_and_for_which_calls(self) -> None:
        role = self.group[1]

        async def use() -> str:
            calls = [asyncio.ensure_future(role.call("wait_until_open")) for _ in range(5)]
            await role.call("greet", "you")
            text = await role.stacks(deadline_s=LONG_S)
            await role.call("open")
            await asyncio.gather(*calls)
            await role.call("shut")
            return text

        text = self.run(use())
        for word in ("echo[1] is serving", f"pid {role.pid}", "'wait_until_open' for", "in wait_until_open", "more ("):
            assert word in text, f"the text lacks {word!r}: {text}"
        assert "await self.is_open.wait()" in text
        assert "event loop is responsive" in text
        assert "MainThread" in text
        assert "pending calls: no call" in self.run(role.stacks(deadline_s=LONG_S))

    def test_a_group_says_what_each_does(self) -> None:
        texts = self.run(self.group.stacks(deadline_s=LONG_S))
        assert [text.partition(" ")[0] for text in texts] == ["echo[0]", "echo[1]", "echo[2]"]

    def test_a_closed_role_says_so(self) -> None:
        async def use(cluster: Cluster) -> None:
            role = await cluster.start(echo(), deadline_s=START_S)
            await role.close()
            assert await role.stacks(deadline_s=LONG_S) == "echo[0] is closed."

        self.with_cluster(use)


class BlockedStackChecks(ClusterChecks):
    """The stack of a role that cannot process calls shows where it is blocked."""

    def test_a_role_in_a_plain_method_says_where(self) -> None:
        async def use(cluster: Cluster) -> None:
            role = await cluster.start(echo(), deadline_s=START_S)
            call = await self._begin(role, "block")
            text = await role.stacks(deadline_s=LONG_S)
            for word in ("'block' for", "in block", "time.sleep(3600)", "did not respond"):
                assert word in text, f"the text lacks {word!r}: {text}"
            await self._end(role, call)

        self.with_cluster(use, close_deadline_s=0.0)

    def test_a_role_whose_interpreter_is_held_is_asked_by_a_signal(self) -> None:
        async def use(cluster: Cluster) -> None:
            role = await cluster.start(echo(), deadline_s=START_S)
            call = await self._begin(role, "hold_interpreter")
            text = await role.stacks(deadline_s=SHORT_S)
            for word in ("'hold_interpreter' for", "has not answered since", "signal", "in hold_interpreter"):
                assert word in text, f"the text lacks {word!r}: {text}"
            assert "tasks are not known" in text
            await self._end(role, call)

        self.with_cluster(use, close_deadline_s=0.0)

    def test_a_stopped_process_is_said_to_be(self) -> None:
        async def use(cluster: Cluster) -> None:
            group = await cluster.start_group(echo(), size=2, deadline_s=START_S)
            os.kill(group[1].pid, signal.SIGSTOP)
            try:
                well, stopped = await group.stacks(deadline_s=SHORT_S)
            finally:
                os.kill(group[1].pid, signal.SIGCONT)
            assert "event loop is responsive" in well
            assert (is_silent(well), is_silent(stopped)) == (False, True)
            for word in ("echo[1]", "has not answered since", "did not answer a signal", "is stopped by a signal"):
                assert word in stopped, f"the text lacks {word!r}: {stopped}"
            assert await group.call(1, "greet", "you") == "hello you!"  # late answers and signals have no effect
            assert "in greet" not in (await group.stacks(deadline_s=LONG_S))[1]

        self.with_cluster(use)

    def test_a_dead_rank_says_so_beside_the_others(self) -> None:
        async def use(cluster: Cluster) -> None:
            group = await cluster.start_group(echo(), size=2, deadline_s=START_S)
            os.kill(group[0].pid, signal.SIGKILL)
            await death_of(*group)
            dead, well = await group.stacks(deadline_s=LONG_S)
            assert "echo[0] is dead" in dead
            assert "SIGKILL" in dead or "Ray says" in dead
            assert well.startswith("echo[1] is serving")

        self.with_cluster(use)

    async def _begin(self, role: Role, method: str) -> "asyncio.Future[object]":
        started = self.folder / "started"
        call = asyncio.ensure_future(role.call(method, started))
        await until(started.exists, f"{method} to begin", deadline_s=START_S)
        return call

    async def _end(self, role: Role, call: "asyncio.Future[object]") -> None:
        await role.close()
        await asyncio.wait([call])
        assert call.exception() is not None
