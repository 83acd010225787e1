"""Engines in separate processes: equal answers, weights by file, and no leftover processes."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.errors import EngineDiedError, EngineError, NotReadyError, WeightProofError
from rl_core.weights import AdapterUpdate, ProofTolerances, digest_tensors, publish_weights
from rl_core.weights.ipc import HostMemory, IpcTransport, opened
from rl_core.weights.transports import SharedFileTransport
from rl_core.weights.update import InProcess, WeightUpdate
from rl_rollout.engines.options import TransformersOptions, VLLMOptions
from rl_rollout.engines.process import EngineClient, EnginePlacement, ProcessEngine
from rl_rollout.engines.protocol import GenerateRequest, Generation, SamplingParams
from rl_rollout.engines.streaming import stream
from rl_rollout.engines.transformers import TransformersEngine
from rl_rollout.testing import AdapterConformance, EngineConformance, generate, refuses
from rl_rollout.testing.reference_model import PROMPT, TIED_HEAD, canary_of, make_adapter, merged, perturbed
from rl_rollout.testing.update_checks import SEQUENCE


def hosted(name: str, model_dir: Path, options: Any) -> ProcessEngine:
    return ProcessEngine(
        name, model_dir, options, host=EnginePlacement(environment={"OMP_NUM_THREADS": "1"}, deadline_s=300)
    )


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


RANK = 4


@pytest.fixture(scope="module")
def transformers_process(tied_model_dir: Path) -> Iterator[ProcessEngine]:
    engine = hosted("transformers", tied_model_dir, TransformersOptions(max_model_len=128, max_lora_rank=RANK))
    run(engine.start())
    yield engine
    run(engine.close())


class TestTransformersProcess(EngineConformance):
    transport = SharedFileTransport

    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, transformers_process: ProcessEngine) -> ProcessEngine:
        return transformers_process


class TestTransformersProcessAdapters(AdapterConformance):
    transport = SharedFileTransport

    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, transformers_process: ProcessEngine) -> ProcessEngine:
        return transformers_process


def test_a_process_gives_the_same_bits(transformers_process: ProcessEngine, tied_model_dir: Path) -> None:
    here = TransformersEngine(tied_model_dir, TransformersOptions(max_model_len=128))
    run(here.start())
    inside = generate(here, num_samples=4, seed=3)
    outside = generate(transformers_process, num_samples=4, seed=3)
    for first, second in zip(inside, outside, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
    run(here.close())


def test_tensors_of_this_process_are_refused(transformers_process: ProcessEngine) -> None:
    with refuses("SharedFileTransport"):
        run(transformers_process.update_weights(WeightUpdate(version=1, digests={}, location=InProcess(tensors={}))))


def test_a_process_opens_weights_in_shared_memory_and_keeps_none_of_it(
    transformers_process: ProcessEngine, tied_model_dir: Path
) -> None:
    """This is the code path for GPUs, on host memory."""
    old = load_file(tied_model_dir / "model.safetensors")
    new = perturbed(old, scale=0.05)
    transport = IpcTransport(bucket_bytes=30_000, memory=HostMemory())
    canary = canary_of(tied_model_dir, new, SEQUENCE)
    try:
        update = transport.pack(new, version=6, tied=TIED_HEAD)
        report = run(publish_weights(update, [transformers_process], canary=canary, tolerances=ProofTolerances()))
        assert report.version == 6
        assert report.num_tensors == len(new) + 1
        with opened(update) as tensors:
            for tensor in tensors.values():
                tensor.fill_(7)  # the engine serves its own copy
        (scores,) = run(transformers_process.score([SEQUENCE]))
        assert canary.logprobs is not None
        np.testing.assert_allclose(scores.token_logprobs, canary.logprobs[0], atol=1e-4)
        with pytest.raises(WeightProofError, match="was changed in transit"):
            run(publish_weights(update, [transformers_process], canary=canary, tolerances=ProofTolerances()))
    finally:
        transport.close()
        files = SharedFileTransport()
        run(transformers_process.update_weights(files.pack(old, version=0, tied=TIED_HEAD)))
        files.close()


def test_a_process_says_what_it_does(transformers_process: ProcessEngine, tied_model_dir: Path) -> None:
    text = run(transformers_process.stacks(deadline_s=60.0))
    assert f"transformers engine[0] is serving in pid {transformers_process.pid}" in text
    assert "its event loop is responsive" in text
    unstarted = hosted("transformers", tied_model_dir, None)
    assert run(unstarted.stacks(deadline_s=60.0)) == "transformers engine[0] has no process."


Tensors = dict[str, torch.Tensor]


def flip_bit(tensors: Tensors, random: np.random.Generator) -> None:
    name = list(tensors)[int(random.integers(len(tensors)))]
    flat = tensors[name].reshape(-1).view(torch.int32)
    flat[int(random.integers(len(flat)))] ^= 1 << int(random.integers(31))


def swap(tensors: Tensors, random: np.random.Generator) -> None:
    kind = ("q_proj.lora_A", "q_proj.lora_B", "down_proj.lora_A")[int(random.integers(3))]
    first, second = (name for name in tensors if f".{kind}." in name)
    tensors[first], tensors[second] = tensors[second], tensors[first]


def scale(tensors: Tensors, random: np.random.Generator) -> None:
    for name in [name for name in tensors if "lora_B" in name]:
        tensors[name] *= float(random.choice([0.5, 2.0]))


def lose(tensors: Tensors, random: np.random.Generator) -> None:
    tensors.pop(list(tensors)[int(random.integers(len(tensors)))])


def stay(tensors: Tensors, random: np.random.Generator) -> None:
    """Shift every tensor, as in another version."""
    tensors.update({name: tensor + float(random.uniform(1e-6, 1e-3)) for name, tensor in tensors.items()})


CHANGED = "was changed in transit to the engine"


@pytest.mark.parametrize(
    ("fault", "words"),
    [(flip_bit, CHANGED), (swap, CHANGED), (scale, CHANGED), (stay, CHANGED), (lose, "missing")],
)
def test_an_adapter_that_goes_wrong_between_processes_is_named(
    fault: Callable[[Tensors, np.random.Generator], None],
    words: str,
    transformers_process: ProcessEngine,
    tied_model_dir: Path,
) -> None:
    """The file changes between the sender and the engine."""
    base = load_file(tied_model_dir / "model.safetensors")
    told, transport = AdapterUpdate(rank=RANK, base=digest_tensors(base)), SharedFileTransport()
    sent = make_adapter(base, rank=RANK, seed=1)
    canary = canary_of(tied_model_dir, merged(base, sent), SEQUENCE)
    for seed in range(8):
        update = transport.pack(sent, version=1 + seed, tied=TIED_HEAD, adapter=told)
        fault(wrong := {name: tensor.clone() for name, tensor in sent.items()}, np.random.default_rng(seed))
        save_file(wrong, update.location.file)
        with pytest.raises((WeightProofError, EngineError), match=words):
            run(publish_weights(update, [transformers_process], canary=canary, tolerances=ProofTolerances()))
    transport.close()
    TestTransformersProcessAdapters().restore(transformers_process, tied_model_dir)


def test_a_process_that_dies_fails_who_waits(tied_model_dir: Path) -> None:
    engine = hosted("transformers", tied_model_dir, TransformersOptions(max_model_len=250))
    run(engine.start())
    request = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=200), num_samples=64)

    async def kill() -> list[Generation]:
        running = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0)
        assert engine._role is not None
        os.kill(engine._role.pid, 9)
        return await running

    with pytest.raises(EngineError, match="killed by signal SIGKILL"):
        run(kill())
    run(engine.close())
    with pytest.raises(NotReadyError, match="closed"):
        generate(engine)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_an_engine_killed_in_a_stream_fails_it_and_nothing_hangs(tied_model_dir: Path, max_restarts: int) -> None:
    async def work() -> None:
        engine = ProcessEngine(
            "transformers",
            tied_model_dir,
            TransformersOptions(max_model_len=250),
            host=EnginePlacement(environment={"OMP_NUM_THREADS": "1"}, max_restarts=max_restarts),
        )
        await engine.start()
        try:
            sampling = SamplingParams(max_tokens=200)
            request = GenerateRequest(input_ids=PROMPT, sampling=sampling, num_samples=64)
            async with asyncio.timeout(60), aclosing(stream(engine, request)) as pieces:
                await anext(pieces)
                os.kill(engine.pid, signal.SIGKILL)
                async for _ in pieces:
                    pass
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"killed by signal SIGKILL|started again"):
        asyncio.run(work())


def test_weights_do_not_wait_for_a_process_that_is_started_again(tied_model_dir: Path) -> None:
    """Waiting weights would load after, and be older than, those that the restart loads."""
    engine = ProcessEngine(
        "transformers", tied_model_dir, TransformersOptions(max_model_len=250), host=EnginePlacement(max_restarts=1)
    )
    transport = SharedFileTransport()
    tensors = load_file(tied_model_dir / "model.safetensors")
    taken: list[int] = []

    async def go() -> None:
        asked = asyncio.Event()

        async def give(calls: EngineClient) -> None:
            await asked.wait()
            taken.append((await calls.update_weights(transport.pack(tensors, version=2, tied=TIED_HEAD))).version)

        engine.on_restart = give
        await engine.start()
        os.kill(engine.pid, 9)
        async with asyncio.timeout(60):
            while engine.state != "restarting":
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDiedError, match="is restarting; it accepts no weights now"):
            await engine.update_weights(transport.pack(tensors, version=1, tied=TIED_HEAD))
        asked.set()
        (found,) = await engine.generate(GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=2)))
        assert taken == [2]
        assert set(found.policy_versions.tolist()) == {2}

    try:
        run(go())
    finally:
        run(engine.close())
        transport.close()


def test_vllm_in_its_own_process_serves_an_untied_model(untied_model_dir: Path) -> None:
    engine = hosted("vllm", untied_model_dir, VLLMOptions(max_model_len=64, max_num_seqs=32, kv_cache_gib=0.25))
    suite = EngineConformance()
    suite.transport = SharedFileTransport
    run(engine.start())
    try:
        assert "vllm" in engine.traits.name
        suite.test_scores_are_the_reference_models(engine, untied_model_dir)
        suite.test_an_update_replaces_what_is_served(engine, untied_model_dir)
    finally:
        run(engine.close())
    with pytest.raises(NotReadyError, match="closed"):
        generate(engine)
