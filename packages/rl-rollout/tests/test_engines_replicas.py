"""Several engines as one: no request is lost when one dies, and none serves after missing an update."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_core.cluster import ClusterOptions
from rl_core.cluster.processes.guard import is_running
from rl_core.errors import EngineDiedError, EngineError, WeightProofError
from rl_core.weights import AdapterUpdate, digest_tensors
from rl_core.weights.publish import ProofTolerances
from rl_core.weights.transports import SharedFileTransport, TensorTransport
from rl_core.weights.update import Canary, WeightReceipt, WeightUpdate
from rl_rollout.engines.options import TransformersOptions
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.engines.protocol import GenerateRequest, Generation, SamplingParams, TokenScores
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.scripted import DEFAULT_TRAITS, ScriptedEngine, honest_receipt
from rl_rollout.testing import EngineConformance, generate
from rl_rollout.testing.reference_model import PROMPT, TIED_HEAD, canary_of, make_adapter, merged, perturbed

SEQUENCE = np.arange(2, 12, dtype=np.int32)
EXACT = ProofTolerances()


def request(*, num_samples: int = 1, seed: int = 0, max_tokens: int = 4) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
    return GenerateRequest(input_ids=PROMPT, sampling=sampling, num_samples=num_samples)


def an_update(version: int) -> tuple[WeightUpdate, Canary]:
    update = TensorTransport().pack({"a.weight": torch.full((2, 2), float(version))}, version=version, tied={})
    scores = np.full(3, -1.0, np.float32)
    scores[0] = 0.0
    return update, Canary(sequences=[np.array([1, 2, 3], np.int32)], logprobs=[scores])


def dying(_: GenerateRequest, __: int) -> Sequence[int]:
    raise EngineDiedError("the GPU fell off the bus.")


def says(token: int) -> Callable[[GenerateRequest, int], Sequence[int]]:
    return lambda request, index: [token]


def run_with(replicas: Sequence[ScriptedEngine], work: Callable[[ReplicatedEngine], Any]) -> Any:
    async def go() -> Any:
        engine = ReplicatedEngine(replicas)
        await engine.start()
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(go())


def test_a_request_of_an_engine_that_dies_goes_to_another() -> None:
    first, second = ScriptedEngine(dying), ScriptedEngine(says(7))

    async def work(engine: ReplicatedEngine) -> list[list[Generation]]:
        return list(await asyncio.gather(*(engine.generate(request(seed=seed)) for seed in range(20))))

    answers = run_with([first, second], work)
    assert [samples[0].token_ids.tolist() for samples in answers] == [[7]] * 20
    assert len(second.requests) == 20


def test_a_request_that_ends_every_engine_is_given_up() -> None:
    replicas = [ScriptedEngine(dying) for _ in range(5)]
    with pytest.raises(EngineDiedError, match="3 engines died during this request, which may be the cause"):
        run_with(replicas, lambda engine: engine.generate(request()))
    assert [len(replica.requests) for replica in replicas].count(1) == 3


def test_when_all_are_dead_the_error_says_how_each_died() -> None:
    replicas = [ScriptedEngine(dying), ScriptedEngine(dying)]
    with pytest.raises(EngineDiedError, match=r"none of 2 engines serves.*replica 0: the GPU.*replica 1: the GPU"):
        run_with(replicas, lambda engine: engine.generate(request()))


def test_a_request_that_is_refused_is_not_tried_elsewhere() -> None:
    replicas = [ScriptedEngine(says(1)), ScriptedEngine(says(1))]
    with pytest.raises(EngineError, match="max_tokens must be at least 1"):
        run_with(replicas, lambda engine: engine.generate(request(max_tokens=0)))


def test_what_is_scored_is_spread_and_keeps_its_order_when_a_replica_dies() -> None:
    num_scored = [0, 0, 0]

    def score(index: int) -> Any:
        def one(sequence: np.ndarray) -> np.ndarray:
            num_scored[index] += 1
            if index == 0 and num_scored[0] == 3:
                raise EngineDiedError("the GPU fell off.")
            return np.full(len(sequence), -float(sequence[0]), np.float32)

        return one

    class Waiting(ScriptedEngine):
        async def score(self, *args: Any, **options: Any) -> list[TokenScores]:
            await asyncio.sleep(0)  # all are in progress
            return await super().score(*args, **options)

    sequences = [np.array([1 + index, *range(40)], np.int32) for index in range(12)]
    replicas = [Waiting(says(1), score=score(index)) for index in range(3)]

    async def work(engine: ReplicatedEngine) -> list[TokenScores]:
        return await engine.score(sequences, top_k=4)

    scored = run_with(replicas, work)
    assert [float(scores.logprobs[5, 0]) for scores in scored] == [-float(1 + index) for index in range(12)]
    assert {scores.token_ids.shape for scores in scored} == {(41, 5)}
    assert num_scored[0] == 4
    assert min(num_scored[1:]) >= 4


def test_every_replica_gets_and_proves_an_update() -> None:
    replicas = [ScriptedEngine(says(1)) for _ in range(3)]

    async def work(engine: ReplicatedEngine) -> Any:
        update, canary = an_update(4)
        return await engine.publish(update, canary=canary, tolerances=EXACT)

    report = run_with(replicas, work)
    assert report.version == 4
    assert [[one.version for one in replica.updates] for replica in replicas] == [[4]] * 3


def test_a_replica_that_serves_something_else_is_named() -> None:
    def stale(update: WeightUpdate) -> WeightReceipt:
        receipt = honest_receipt(update)
        return replace(receipt, live={name: probe + 1 for name, probe in receipt.live.items()})

    async def work(engine: ReplicatedEngine) -> Any:
        update, canary = an_update(4)
        return await engine.publish(update, canary=canary, tolerances=EXACT)

    replicas = [ScriptedEngine(says(1)), ScriptedEngine(says(1), receive=stale)]
    with pytest.raises(WeightProofError, match=r"replica 1: tensor 'a\.weight' arrived") as raised:
        run_with(replicas, work)
    assert raised.value.tensor == "a.weight"


def test_a_replica_that_dies_in_an_update_does_not_hold_up_the_others() -> None:
    def die(_: WeightUpdate) -> WeightReceipt:
        raise EngineDiedError("out of memory.")

    async def work(engine: ReplicatedEngine) -> tuple[Any, list[list[Generation]]]:
        update, canary = an_update(4)
        report = await engine.publish(update, canary=canary, tolerances=EXACT)
        return report, [await engine.generate(request(seed=seed)) for seed in range(4)]

    good = ScriptedEngine(says(7))
    report, answers = run_with([ScriptedEngine(says(1), receive=die), good], work)
    assert report.version == 4
    assert {samples[0].token_ids.tolist()[0] for samples in answers} == {7}


def test_a_replica_with_less_room_for_adapters_is_refused() -> None:
    first = ScriptedEngine({}, traits=replace(DEFAULT_TRAITS, max_lora_rank=8, max_adapters=2))

    async def work(engine: ReplicatedEngine) -> None:
        assert engine.traits.max_lora_rank == 8
        with pytest.raises(EngineError, match=r"max_lora_rank of at least 8 .*; found .*, 4 and 2 in scripted"):
            await engine.add(ScriptedEngine({}, traits=replace(DEFAULT_TRAITS, max_lora_rank=4, max_adapters=2)))
        with pytest.raises(EngineError, match=r"max_adapters of at least 2; found .*, 8 and 1 in scripted"):
            await engine.add(ScriptedEngine({}, traits=replace(DEFAULT_TRAITS, max_lora_rank=8)))

    run_with([first], work)


@pytest.mark.parametrize("level", [1, 2])
def test_replicas_sleep_at_the_same_level_also_one_that_comes_later(level: Literal[1, 2]) -> None:
    traits = replace(DEFAULT_TRAITS, can_sleep=True)
    replicas = [ScriptedEngine(says(7), traits=traits) for _ in range(3)]

    async def work(engine: ReplicatedEngine) -> None:
        await engine.sleep(level)
        await engine.add(replicas[2])
        with pytest.raises(EngineError, match="is asleep"):
            await replicas[2].generate(request())
        await engine.wake()
        for replica in replicas if level == 2 else ():
            with pytest.raises(EngineError, match="slept at level 2"):
                await replica.generate(request())
        if level == 2:
            update, canary = an_update(4)
            await engine.publish(update, canary=canary, tolerances=EXACT)
        for replica in replicas:
            assert (await replica.generate(request()))[0].token_ids.tolist() == [7]

    run_with(replicas[:2], work)


# -- real engines in separate processes


def hosted(
    model_dir: Path, *, index: int, kind: Any = "process", max_restarts: int = 3, max_lora_rank: int = 0
) -> ProcessEngine:
    host = EnginePlacement(
        cluster=ClusterOptions(kind=kind), environment={"OMP_NUM_THREADS": "1"}, max_restarts=max_restarts
    )
    options = TransformersOptions(max_model_len=128, max_lora_rank=max_lora_rank)
    return ProcessEngine("transformers", model_dir, options, host=host, index=index)


@pytest.fixture(scope="module")
def two_processes(tied_model_dir: Path) -> Iterator[ReplicatedEngine]:
    engine = ReplicatedEngine([hosted(tied_model_dir, index=index) for index in range(2)])
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


class TestReplicatedEngine(EngineConformance):
    transport = SharedFileTransport

    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, two_processes: ReplicatedEngine) -> ReplicatedEngine:
        return two_processes


def test_an_engine_killed_under_load_loses_no_request_and_comes_back_with_the_present_adapter(
    tied_model_dir: Path,
) -> None:
    """Kill one of two replicas while 32 requests run; the restarted replica serves only version 9."""
    base = load_file(tied_model_dir / "model.safetensors")
    adapter, told = make_adapter(base, rank=4, seed=1), AdapterUpdate(rank=4, base=digest_tensors(base))
    canary = canary_of(tied_model_dir, merged(base, adapter), SEQUENCE)
    long = [request(num_samples=2, seed=seed, max_tokens=100) for seed in range(32)]

    async def go() -> tuple[list[list[Generation]], list[list[Generation]], int, int]:
        replicas = [hosted(tied_model_dir, index=index, max_lora_rank=4) for index in range(2)]
        engine = ReplicatedEngine(replicas)
        transport = SharedFileTransport()
        try:
            await engine.start()
            assert engine.traits.max_lora_rank == 4
            update = transport.pack(adapter, version=9, tied=TIED_HEAD, adapter=told)
            await engine.publish(update, canary=canary, tolerances=EXACT)
            alone = [await engine.generate(one) for one in long[:2]]
            running = [asyncio.ensure_future(engine.generate(one)) for one in long]
            await asyncio.sleep(0)
            first_pid = replicas[0].pid
            os.kill(first_pid, signal.SIGKILL)
            answers = list(await asyncio.gather(*running))
            async with asyncio.timeout(120):
                while engine.num_serving < 2:
                    await asyncio.sleep(0.05)
            assert [load.num_restarts for load in engine.loads()] == [1, 0]
            said = await engine.stacks(deadline_s=60)
            assert [f" in pid {one.pid};" in said[index] for index, one in enumerate(replicas)] == [True, True]
            again = await replicas[0].generate(long[0])
            return answers, [*alone, again], first_pid, replicas[0].pid
        finally:
            await engine.close()
            transport.close()

    answers, checked, before, after = asyncio.run(go())
    assert [len(samples) for samples in answers] == [2] * 32
    assert {version for samples in answers for one in samples for version in one.policy_versions.tolist()} == {9}
    assert before != after
    *alone, again = checked
    assert again[0].policy_versions.tolist() == [9] * len(again[0].token_ids)
    assert again[0].token_ids.tolist() == alone[0][0].token_ids.tolist() == answers[0][0].token_ids.tolist()


def test_a_process_takes_the_place_of_another_under_load(tied_model_dir: Path) -> None:
    """The first replica is removed at once; the second draws the same tokens for its unfinished requests."""
    tensors = perturbed(load_file(tied_model_dir / "model.safetensors"), scale=0.05)
    long = [request(num_samples=2, seed=seed, max_tokens=100) for seed in range(8)]

    async def go() -> tuple[list[list[Generation]], list[Generation], int, list[int]]:
        first = hosted(tied_model_dir, index=0)
        engine = ReplicatedEngine([first])
        transport = SharedFileTransport()
        try:
            await engine.start()
            update = transport.pack(tensors, version=9, tied=TIED_HEAD)
            await engine.publish(update, canary=canary_of(tied_model_dir, tensors, SEQUENCE), tolerances=EXACT)
            alone, pid = await engine.generate(long[0]), first.pid
            index = await engine.add(hosted(tied_model_dir, index=1))
            running = [asyncio.ensure_future(engine.generate(one)) for one in long]
            await asyncio.sleep(0)
            loads = engine.loads()
            await engine.remove(0, deadline_s=0.0)
            answers = list(await asyncio.gather(*running))
            return answers, alone, pid, [index, *(load.num_running for load in loads)]
        finally:
            await engine.close()
            transport.close()

    answers, alone, pid, (index, *num_running) = asyncio.run(go())
    assert index == 1
    assert min(num_running) > 0
    assert sum(num_running) == 16
    assert [one.token_ids.tolist() for one in answers[0]] == [one.token_ids.tolist() for one in alone]
    assert {version for samples in answers for one in samples for version in one.policy_versions.tolist()} == {9}
    assert not is_running(pid)


def test_an_engine_that_is_killed_while_nobody_asks_it_is_told_about(tied_model_dir: Path) -> None:
    async def go() -> None:
        replica = hosted(tied_model_dir, index=0, max_restarts=0)
        engine = ReplicatedEngine([replica])
        try:
            await engine.start()
            os.kill(replica.pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                while replica.state != "dead":
                    await asyncio.sleep(0.02)
            await engine.generate(request())
        finally:
            await engine.close()

    with pytest.raises(EngineDiedError, match=r"engine\[0\].*killed by signal SIGKILL \(9\)"):
        asyncio.run(go())


def test_the_only_engine_comes_back_for_weights_that_replaced_the_ones_it_had(tied_model_dir: Path) -> None:
    """The restart finds the file of the next version, and waits until it is published or the engine closes."""
    stored = load_file(tied_model_dir / "model.safetensors")
    versions = {version: perturbed(stored, scale=0.02 * version) for version in (1, 2, 3)}

    async def go() -> tuple[int, list[Generation], float]:
        replica = hosted(tied_model_dir, index=0)
        engine = ReplicatedEngine([replica])
        transport = SharedFileTransport()

        async def killed_while_packed(version: int) -> WeightUpdate:
            os.kill(replica.pid, signal.SIGKILL)
            update = transport.pack(versions[version], version=version, tied=TIED_HEAD)
            async with asyncio.timeout(120):
                while not engine.is_waiting_for_weights:
                    await asyncio.sleep(0.05)
            return update

        async def publish(update: WeightUpdate) -> int:
            canary = canary_of(tied_model_dir, versions[update.version], SEQUENCE)
            return (await engine.publish(update, canary=canary, tolerances=EXACT)).version

        try:
            await engine.start()
            await publish(transport.pack(versions[1], version=1, tied=TIED_HEAD))
            published = await publish(await killed_while_packed(2))
            samples = await engine.generate(request())
            await killed_while_packed(3)
        finally:
            started = time.monotonic()
            await engine.close()
            transport.close()
        return published, samples, time.monotonic() - started

    published, (sample,), close_s = asyncio.run(go())
    assert published == 2
    assert set(sample.policy_versions.tolist()) == {2}
    assert close_s < 30  # the role's close deadline is 20 s


def test_what_an_engine_says_is_the_same_through_replicas(two_processes: ReplicatedEngine) -> None:
    assert two_processes.traits.name.startswith("2 x transformers")
    first, second = (generate(two_processes, num_samples=4, seed=3) for _ in range(2))
    assert [one.token_ids.tolist() for one in first] == [one.token_ids.tolist() for one in second]


class Restarting(ProcessEngine):
    """An engine whose process dies after its state was read; no caller may wait for it."""

    def __init__(self) -> None:
        """Start no process."""
        super().__init__("transformers", Path("nowhere"))
        self.states = ["serving", "restarting"]

    @property
    def state(self) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    async def wake(self) -> None:
        raise AssertionError("it was asked while it is being started again")


def test_an_engine_that_dies_between_two_looks_is_not_waited_for() -> None:
    replica = Restarting()
    asyncio.run(ReplicatedEngine([replica]).wake())
    assert replica.states == ["restarting"]
