"""Replicas added and removed while requests run."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_replicas import EXACT, Held, a_canary, a_request, an_update, ask, run_with, until

from rl_core.errors import DeadlineError, EngineDiedError, EngineError, NotReadyError, WeightProofError
from rl_core.weights.update import WeightReceipt, WeightUpdate
from rl_rollout.engines.protocol import GenerateRequest, Generation
from rl_rollout.engines.replicas import weights as replica_weights
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.scripted import DEFAULT_TRAITS, ScriptedEngine, honest_receipt


async def publish(engine: ReplicatedEngine, version: int) -> Any:
    return await engine.publish(an_update(version), canary=a_canary(), tolerances=EXACT)


def versions(engine: ScriptedEngine) -> list[int]:
    return [update.version for update in engine.updates]


def test_a_replica_that_is_added_has_the_present_weights_before_it_is_asked() -> None:
    first, second = Held(1), Held(2)

    async def work(engine: ReplicatedEngine) -> list[Generation]:
        await publish(engine, 3)
        await publish(engine, 4)
        running = ask(engine, 0, 1, 2)
        assert await engine.add(second.engine) == 1
        assert (engine.num_replicas, engine.num_serving) == (2, 2)
        (new,) = ask(engine, 3)
        await until(lambda: second.num_running == 1, "the new replica to be asked")
        first.finish()
        second.finish()
        await asyncio.gather(*running)
        return await new

    (sample,) = run_with([first], work)
    assert sample.token_ids.tolist() == [2]
    assert sample.policy_versions.tolist() == [4]
    assert versions(second.engine) == [4]


def test_a_publication_while_a_replica_is_added_reaches_it_before_it_serves() -> None:
    """Version 5 is published while the new replica proves version 4."""
    first, second = Held(1), Held(2)
    published: list[asyncio.Future[Any]] = []

    async def work(engine: ReplicatedEngine) -> None:
        def receive(update: WeightUpdate) -> WeightReceipt:
            if update.version == 4:
                published.append(asyncio.ensure_future(publish(engine, 5)))
            return honest_receipt(update)

        await publish(engine, 4)
        await engine.add(ScriptedEngine(second._say, receive=receive))
        await published[0]
        added = engine._replicas.get(1).engine
        assert isinstance(added, ScriptedEngine)
        assert versions(added) == [4, 5]
        assert versions(first.engine) == [4, 5]

    run_with([first], work)


def test_a_replica_that_finds_the_next_versions_file_waits_for_its_publication() -> None:
    first, second = Held(1), Held(2)

    async def work(engine: ReplicatedEngine) -> None:
        def receive(update: WeightUpdate) -> WeightReceipt:
            return honest_receipt(replace(update, digests=an_update(5).digests))

        await publish(engine, 4)
        adding = asyncio.ensure_future(engine.add(ScriptedEngine(second._say, receive=receive)))
        await until(lambda: engine.is_waiting_for_weights, "the new replica to wait")
        assert (engine.num_replicas, engine.num_serving) == (2, 1)
        await publish(engine, 5)
        assert await adding == 1
        assert not engine.is_waiting_for_weights
        assert engine.num_serving == 2

    run_with([first], work)


def test_a_replica_that_waits_for_weights_in_vain_is_closed_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_weights, "NEWS_DEADLINE_S", 0.01)
    first = Held(1)
    late = ScriptedEngine({}, receive=lambda update: replace(honest_receipt(update), version=0))

    async def work(engine: ReplicatedEngine) -> None:
        await publish(engine, 4)
        with pytest.raises(DeadlineError, match=r"replica 1 could not load.*serves version 0"):
            await engine.add(late)
        assert (engine.num_replicas, engine.num_serving) == (1, 1)
        with pytest.raises(NotReadyError, match="closed"):
            late.traits  # noqa: B018
        assert not engine.is_waiting_for_weights

    run_with([first], work)


def test_a_replica_of_another_model_is_refused() -> None:
    other = ScriptedEngine({}, traits=replace(DEFAULT_TRAITS, vocab_size=7))

    async def work(engine: ReplicatedEngine) -> None:
        with pytest.raises(EngineError, match=r"a vocabulary of 1048576 tokens.*found 7, "):
            await engine.add(other)
        assert engine.num_replicas == 1
        assert await engine.add(Held(2).engine) == 2  # indices are not reused

    run_with([Held(1)], work)


def test_a_replica_that_is_removed_ends_what_it_has_and_gets_no_more() -> None:
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine) -> list[list[Generation]]:
        running = ask(engine, *range(4))
        await until(lambda: held[0].num_running == held[1].num_running == 2, "requests to run")
        removing = asyncio.ensure_future(engine.remove(0))
        await until(lambda: engine.num_serving == 1, "the removal to begin")
        later = ask(engine, *range(4, 10))
        await until(lambda: held[1].num_running == 8, "the later ones to run")
        assert not removing.done()
        held[0].finish()
        await removing
        assert engine.num_replicas == 1
        with pytest.raises(NotReadyError, match="closed"):
            held[0].engine.traits  # noqa: B018
        held[1].finish()
        return list(await asyncio.gather(*running, *later))

    answers = run_with(held, work)
    assert sorted(samples[0].token_ids.tolist()[0] for samples in answers) == [1] * 2 + [2] * 8
    assert {samples[0].finish_reason for samples in answers} == {"length"}


def test_requests_that_do_not_end_in_time_begin_anew_elsewhere() -> None:
    held = [Held(1), Held(2), Held(3)]

    async def work(engine: ReplicatedEngine) -> list[list[Generation]]:
        running = ask(engine, *range(6))
        await until(lambda: held[0].num_running == 2, "requests to run")
        moved = [one.sampling for one in held[0].engine.requests]
        await engine.remove(0, deadline_s=0.01)
        await until(lambda: held[1].num_running + held[2].num_running == 6, "all to run elsewhere")
        again = [one.sampling for one in [*held[1].engine.requests[2:], *held[2].engine.requests[2:]]]
        assert len(moved) == len(again) == 2
        assert all(one in again for one in moved)  # including their seeds
        held[1].finish()
        held[2].finish()
        return list(await asyncio.gather(*running))

    answers = run_with(held, work)
    assert {samples[0].token_ids.tolist()[0] for samples in answers} == {2, 3}


def test_the_last_replica_that_serves_stays() -> None:
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine) -> None:
        running = ask(engine, 0, 1)
        await until(lambda: held[0].num_running == held[1].num_running == 1, "requests to run")
        removing = asyncio.ensure_future(engine.remove(1))
        await until(lambda: engine.num_serving == 1, "the removal to begin")
        with pytest.raises(EngineError, match="replica 0 is the last of 2 that serves; add another"):
            await engine.remove(0)
        with pytest.raises(EngineError, match="replica 1 is already being removed"):
            await engine.remove(1)
        with pytest.raises(EngineError, match=r"replica 7 does not exist; the replicas are \[0, 1\]"):
            await engine.remove(7)
        for one in held:
            one.finish()
        await asyncio.gather(removing, *running)

    run_with(held, work)


def test_a_removal_that_is_given_up_leaves_the_replica_serving() -> None:
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine) -> None:
        running = ask(engine, 0, 1)
        await until(lambda: held[0].num_running == 1, "a request to run")
        removing = asyncio.ensure_future(engine.remove(0))
        await until(lambda: engine.num_serving == 1, "the removal to begin")
        removing.cancel()
        await asyncio.wait([removing])
        assert engine.num_serving == 2
        for one in held:
            one.finish()
        await asyncio.gather(*running)

    run_with(held, work)


def test_a_publication_meanwhile_reaches_the_replica_that_still_runs_requests() -> None:
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine) -> list[list[Generation]]:
        running = ask(engine, 0, 1)
        await until(lambda: held[0].num_running == held[1].num_running == 1, "requests to run")
        removing = asyncio.ensure_future(engine.remove(0))
        await until(lambda: engine.num_serving == 1, "the removal to begin")
        await publish(engine, 7)
        for one in held:
            one.finish()
        await removing
        return list(await asyncio.gather(*running))

    answers = run_with(held, work)
    assert [samples[0].policy_versions.tolist() for samples in answers] == [[7], [7]]


def test_a_dead_replica_can_be_removed_and_replaced() -> None:
    def dying(_: GenerateRequest, __: int) -> Sequence[int]:
        raise EngineDiedError("the GPU fell off the bus.")

    held = [Held(1), Held(2)]
    held[0].engine._script = dying

    async def work(engine: ReplicatedEngine) -> None:
        running = ask(engine, 0, 1)
        await until(lambda: held[1].num_running == 2, "the requests to move")
        held[1].finish()
        await asyncio.gather(*running)
        with pytest.raises(EngineError, match="replica 1 is the last of 2 that serves"):
            await engine.remove(1)
        await engine.remove(0)
        assert await engine.add(Held(3).engine) == 2
        await engine.remove(1)
        assert (engine.num_replicas, engine.num_serving) == (1, 1)

    run_with(held, work)


def test_a_replica_whose_proof_fails_is_asked_nothing_before_it_serves_what_is_published() -> None:
    """Version 5 is not published; the replicas that loaded it return to version 4."""
    lies = [True]

    def receive(update: WeightUpdate) -> WeightReceipt:
        receipt = honest_receipt(update)
        if update.version == 5 and lies:
            return replace(receipt, live={name: probe + 1 for name, probe in receipt.live.items()})
        return receipt

    held = [Held(1), Held(2, receive=receive)]

    async def work(engine: ReplicatedEngine) -> list[list[Generation]]:
        await publish(engine, 4)
        with pytest.raises(WeightProofError, match="replica 1"):
            await publish(engine, 5)
        running = ask(engine, 0, 1)
        await until(lambda: held[0].num_running == held[1].num_running == 1, "both to be asked")
        for one in held:
            one.finish()
        return list(await asyncio.gather(*running))

    answers = run_with(held, work)
    assert [samples[0].policy_versions.tolist() for samples in answers] == [[4], [4]]
    assert [versions(one.engine) for one in held] == [[4, 5, 4], [4, 5, 4]]


def test_a_request_waits_for_the_next_weights_where_those_to_go_back_to_are_gone() -> None:
    """Version 5 fails after its file has replaced version 4's."""
    taken: list[int] = []

    def receive(update: WeightUpdate) -> WeightReceipt:
        taken.append(update.version)
        is_torn = taken[-2:] in ([4, 5], [5, 4])
        return honest_receipt(replace(update, digests=an_update(9).digests) if is_torn else update)

    held = [Held(1, receive=receive)]

    async def work(engine: ReplicatedEngine) -> list[Generation]:
        await publish(engine, 4)
        with pytest.raises(WeightProofError, match="version 5"):
            await publish(engine, 5)
        (running,) = ask(engine, 0)
        await until(lambda: engine.is_waiting_for_weights, "the request to wait")
        await publish(engine, 6)
        await until(lambda: held[0].num_running == 1, "it to be asked")
        assert not engine.is_waiting_for_weights
        held[0].finish()
        return await running

    (sample,) = run_with(held, work)
    assert sample.policy_versions.tolist() == [6]
    assert taken == [4, 5, 4, 6]


def test_a_replica_of_a_mixture_that_is_added_is_compared_with_a_proven_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner compares the canary of the first ones, whose experts it replays; later it may have other weights."""
    monkeypatch.setattr(replica_weights, "NEWS_DEADLINE_S", 0.01)
    canary = replace(a_canary(), logprobs=None)

    def scoring(logprob: float) -> ScriptedEngine:
        return ScriptedEngine({}, score=lambda sequence: np.full(len(sequence), logprob, np.float32))

    async def work(engine: ReplicatedEngine) -> None:
        report = await engine.publish(an_update(4), canary=canary, tolerances=EXACT)
        assert len(report.canary_scores) == 1
        assert await engine.add(scoring(-1.0)) == 1
        with pytest.raises(DeadlineError, match=r"replica 2.*logprob of token 1 of canary sequence 0 is -1\.1"):
            await engine.add(scoring(-1.1))
        assert engine.num_serving == 2

    first = Held(1)
    first.engine = scoring(-1.0)
    run_with([first], work)


def test_each_request_to_a_replica_without_weights_waits_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_weights, "NEWS_DEADLINE_S", 0.01)
    taken: list[int] = []

    def receive(update: WeightUpdate) -> WeightReceipt:
        taken.append(update.version)
        return honest_receipt(replace(update, digests=an_update(9).digests) if len(taken) > 1 else update)

    held = [Held(1, receive=receive)]

    async def work(engine: ReplicatedEngine) -> None:
        await publish(engine, 4)
        with pytest.raises(WeightProofError, match="the engine serves something else"):
            await publish(engine, 5)
        for _ in range(2):
            with pytest.raises(DeadlineError, match="replica 0 could not load the current weights"):
                await engine.generate(a_request())
            assert not engine.is_waiting_for_weights

    run_with(held, work)


def test_who_hears_late_of_a_death_leaves_the_restarted_replica_its_weights() -> None:
    held = [Held(1)]

    async def work(engine: ReplicatedEngine) -> list[Generation]:
        await publish(engine, 4)
        (running,) = ask(engine, 0)
        await until(lambda: held[0].num_running == 1, "it to be asked")
        replica = engine._replicas.get(0)
        replica.note_restart()
        await engine._weights.deliver(replica, replica.engine)
        held[0].die()
        held[0].has_died = False
        await until(lambda: held[0].num_running == 1, "it to be asked again")
        held[0].finish()
        return await running

    (sample,) = run_with(held, work)
    assert sample.policy_versions.tolist() == [4]
    assert versions(held[0].engine) == [4, 4]


def test_unproven_weights_are_not_served_where_there_are_none_to_go_back_to() -> None:
    held = [Held(1, receive=lambda update: replace(honest_receipt(update), version=9))]

    async def work(engine: ReplicatedEngine) -> None:
        with pytest.raises(WeightProofError, match="serves version 9"):
            await publish(engine, 1)
        with pytest.raises(WeightProofError, match="replica 0 serves unproven weights"):
            await engine.generate(a_request())
        assert held[0].engine.requests == []
        await publish(engine, 9)
        (running,) = ask(engine, 0)
        await until(lambda: held[0].num_running == 1, "it to be asked")
        held[0].finish()
        assert (await running)[0].policy_versions.tolist() == [9]

    run_with(held, work)


def test_an_aborted_request_is_not_asked_anew_when_its_replica_goes() -> None:
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine) -> list[Generation]:
        (running,) = ask(engine, 0, request_id="a")
        await until(lambda: held[0].num_running == 1, "it to be asked")
        removing = asyncio.ensure_future(engine.remove(0))
        await engine.abort(["a"])
        samples = await running
        await removing
        return samples

    (sample,) = run_with(held, work)
    assert sample.finish_reason == "abort"
    assert held[1].engine.requests == []
