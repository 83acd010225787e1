"""Checks of calls: to one role, to all, with separate arguments, and in the order in which they finish."""

import asyncio
from typing import Any

import numpy as np

from cluster_conformance.checks import NOTICED_S, START_S, ClusterChecks, catches, within
from rl_core.cluster import Cluster, RoleContext, RoleSpec
from rl_core.errors import DeadlineError, SettingsError, WeightProofError
from rl_core.testing.queue_checks import refuses


class CallChecks(ClusterChecks):
    """Calls work alike in every placement."""

    def test_plain_and_async_methods_are_called_alike(self) -> None:
        role = self.group[1]
        assert role.is_alive
        assert str(role.spec) == "echo[1]"
        assert self.run(role.call("greet", "you")) == "hello you!"
        assert self.run(role.call("greet", "you", mark="?")) == "hello you?"
        assert self.run(self.group.call(2, "greet_async", "you")) == "hello you"

    def test_parameters_of_a_method_may_be_called_as_those_of_the_call(self) -> None:
        given: dict[str, Any] = {"rank": 1, "method": "a", "self": 2}
        assert self.run(self.group.call(0, "named", **given)) == given
        assert self.run(self.group.call_all("named", **given)) == [given] * 3

    def test_calls_of_a_role_overlap(self) -> None:
        role = self.group[0]

        async def use() -> list[int]:
            waiting = [asyncio.ensure_future(role.call("wait_until_open")) for _ in range(3)]
            await role.call("greet", "you")
            assert not any(task.done() for task in waiting)
            await role.call("open")
            results = await asyncio.gather(*waiting)
            await role.call("shut")
            return results

        assert self.run(use()) == [0, 0, 0]

    def test_calls_made_together_begin_together_and_all_in_their_order(self) -> None:
        role = self.group[0]

        async def use() -> tuple[list[int], list[int]]:
            company = await asyncio.gather(*(role.call("company", bytes(50_000)) for _ in range(20)))
            calls = [asyncio.ensure_future(role.call("see", np.full(size, number))) for number, size in sizes]
            for _ in range(3):
                await asyncio.sleep(0)
            await asyncio.gather(*calls)
            return company, [int(value[0]) for value in await role.call("seen_values")]

        sizes = [(0, 1_000_000), (1, 1), (2, 100_000), (3, 1)]
        assert self.run(use()) == ([20] * 20, [0, 1, 2, 3])

    def test_a_group_knows_its_ranks_and_each_role_its_place(self) -> None:
        places: list[RoleContext] = self.run(self.group.call_all("place"))
        assert [(place.name, place.rank, place.size, place.incarnation) for place in places] == [
            ("echo", rank, 3, 1) for rank in range(3)
        ]
        assert all(place.address == "127.0.0.1" for place in places)

    def test_all_are_called_with_the_same_or_each_with_its_own(self) -> None:
        assert self.run(self.group.call_all("greet", "all", mark=".")) == ["hello all."] * 3
        assert self.run(self.group.call_each("greet", [("a",), ("b",), ("c",)])) == ["hello a!", "hello b!", "hello c!"]
        with refuses(SettingsError, "'greet'", "3 roles 'echo'", "found 2"):
            self.run(self.group.call_each("greet", [("a",), ("b",)]))

    def test_arrays_travel_both_ways(self) -> None:
        value = {"rows": np.arange(1_000_000, dtype=np.int32).reshape(1000, 1000), "none": np.zeros((0, 3))}
        for found in self.run(self.group.call_all("echo", value)):
            assert found["rows"].dtype == np.int32
            assert (found["rows"] == value["rows"]).all()
            assert found["none"].shape == (0, 3)

    def test_an_error_keeps_its_class_and_what_it_carries(self) -> None:
        call = self.group[2].call("raise_error", "WeightProofError", "head is stale", tensor="lm_head.weight")
        with catches(WeightProofError) as caught:
            self.run(call)
        error, notes = caught[0], "\n".join(caught[0].__notes__)
        assert (str(error), error.tensor, error.role, error.rank) == ("head is stale", "lm_head.weight", "echo", 2)
        assert "while checking" in notes
        assert "in echo[2]" in notes

    def test_one_that_raises_fails_all_at_once_though_the_others_hang(self) -> None:
        with within(NOTICED_S), catches(ValueError) as caught:
            self.run(self.group.call_all("raise_on", 1))
        assert (str(caught[0]), caught[0].role, caught[0].rank) == ("rank 1 has no rows", "echo", 1)
        assert self.run(self.group.call_all("greet", "you")) == ["hello you!"] * 3

    def test_a_late_answer_is_said_with_role_method_and_what_was_heard(self) -> None:
        with refuses(DeadlineError, "echo[1]", "'wait_forever'", "0.2 s", "called at", "its last message was"):
            self.run(self.group.call(1, "wait_forever", deadline_s=0.2))
        with refuses(TimeoutError, "'wait_forever'"):
            self.run(self.group.call_all("wait_forever", deadline_s=0.2))
        with refuses(TimeoutError, "own words"):
            self.run(self.group.call(1, "raise_error", "TimeoutError", "own words", deadline_s=60.0))

    def test_a_call_that_was_given_up_disturbs_no_other(self) -> None:
        async def use() -> int:
            for _ in range(20):
                try:
                    await asyncio.wait_for(self.group[0].call("wait_until_open"), 0.001)
                except TimeoutError:
                    continue
            await self.group[0].call("open")
            opened: int = await self.group[0].call("wait_until_open")
            await self.group[0].call("shut")
            return opened

        assert self.run(use()) == 0

    def test_a_rank_or_a_method_that_is_not_there_is_refused_with_those_that_are(self) -> None:
        for rank in (9, 3, -1):
            with refuses(SettingsError, "'echo' has ranks 0 to 2", f"found {rank}"):
                self.run(self.group.call(rank, "greet", "you"))
        with refuses(SettingsError, "ranks 0 to 2"):
            self.group[3]
        for method in ("gret", "greeting"):
            with refuses(
                SettingsError, "echo[1], of class EchoRole", f"no method '{method}'", "it has block, ", " greet, "
            ):
                self.run(self.group.call(1, method, "you"))
        with refuses(SettingsError, "no method 'gret'"):
            self.run(self.group.call_all("gret"))
        with refuses(AttributeError, "own words"):
            self.run(self.group.call(1, "raise_error", "AttributeError", "own words"))

    def test_factories_may_be_async_and_need_no_context(self) -> None:
        async def use(cluster: Cluster) -> list[str]:
            slow = RoleSpec(name="slow", factory="cluster_conformance.role:make_slowly", rank=7)
            role = await cluster.start(slow, deadline_s=START_S)
            place = await role.call("place")
            assert (place.rank, place.size) == (7, 1)
            return [await role.call("greet", "you"), str(role.spec)]

        assert self.with_cluster(use) == ["slowly you!", "slow[7]"]
