"""vLLM with adapters: conformance, comparison with peft, and faults that its proof must name."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_adapter_faults import FAULTS, RANK, Fault, Served, base_changed, manager_of

from rl_core.errors import EngineError, WeightProofError
from rl_core.weights import ProofTolerances, TensorTransport, check_receipt
from rl_core.weights.broadcast import BroadcastTransport
from rl_core.weights.digests import LORA_B
from rl_core.weights.transports import SharedFileTransport
from rl_rollout.engines.protocol import GenerateRequest, SamplingParams
from rl_rollout.engines.stepper import Sample
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.testing import AdapterConformance
from rl_rollout.testing.reference_model import TIED_HEAD, merged, refuses, short_request, token_logprobs
from rl_rollout.testing.update_checks import SEQUENCE

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def adapted_vllm(tied_model_dir: Path, learner_process_group: None) -> Iterator[VLLMEngine]:
    """Start an engine with adapters; each test leaves it serving tied_model_dir as version 0."""
    options = VLLMOptions(
        max_model_len=128, max_num_seqs=64, max_num_batched_tokens=192, kv_cache_gib=0.004, max_lora_rank=RANK
    )
    engine = VLLMEngine(tied_model_dir, options)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


class TestVLLMAdapters(AdapterConformance):
    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, adapted_vllm: VLLMEngine) -> VLLMEngine:
        return adapted_vllm


@pytest.mark.parametrize("transport", [SharedFileTransport, BroadcastTransport])
def test_adapters_come_by_file_and_over_the_network(
    transport: Any, adapted_vllm: VLLMEngine, tied_model_dir: Path
) -> None:
    suite = AdapterConformance()
    suite.transport = transport
    suite.test_each_adapter_replaces_the_last_on_the_same_base(adapted_vllm, tied_model_dir)


@pytest.fixture
def served(adapted_vllm: VLLMEngine, tied_model_dir: Path) -> Iterator[Served]:
    found = Served(adapted_vllm, tied_model_dir)
    yield found
    found.restore()


def test_peft_says_the_same_after_five_updates(served: Served, tied_model_dir: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tied_model_dir, dtype=torch.float32, trust_remote_code=False)
    config = LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules="all-linear")
    oracle = get_peft_model(model, config)
    live = {name.replace(".default.", "."): tensor for name, tensor in oracle.named_parameters() if "lora_" in name}
    last = np.zeros(len(SEQUENCE) - 1, np.float32)
    for version in range(1, 6):
        adapter = served.adapter(version)
        assert live.keys() == adapter.keys()
        for name, tensor in adapter.items():
            live[name].data.copy_(tensor)
        scaled = {name: tensor * (3 if name.endswith(LORA_B) else 1) for name, tensor in adapter.items()}
        served.publish(served.packed(scaled, version))
        with torch.inference_mode():
            logits = oracle(torch.from_numpy(SEQUENCE.astype(np.int64)).unsqueeze(0)).logits[0]
        expected = token_logprobs(logits.float().log_softmax(-1).numpy(), SEQUENCE)
        (found,) = asyncio.run(served.engine.score([SEQUENCE]))
        assert np.abs(found.token_logprobs[1:] - expected).max() < 1e-4
        assert np.abs(expected - last).max() > 0.1
        last = expected


def test_a_prompt_is_not_shared_with_another_adapter(served: Served) -> None:
    """Long prompts come from vLLM's prefix cache, short ones from `PromptSharing`."""
    served.publish(served.packed(served.adapter(1), 1))

    async def scores(length: int) -> list[float]:
        prompt = (np.arange(length) % 30 + 2).astype(np.int32)
        requests = [
            GenerateRequest(
                input_ids=prompt, sampling=SamplingParams(max_tokens=2, seed=0), num_samples=3, adapter=name
            )
            for name in ("base", None, "base")
        ]
        together = await asyncio.gather(*map(served.engine.generate, requests))
        alone = [await served.engine.generate(request) for request in requests]
        return [float(sample.logprobs[0]) for group in (*together, *alone) for sample in group]

    for length in (10, 80):
        found = np.array(asyncio.run(scores(length))).reshape(6, 3)
        of_base, of_adapter = found[[0, 2, 3, 5]], found[[1, 4]]
        assert np.ptp(of_base, axis=0).max() < 1e-4
        assert np.ptp(of_adapter, axis=0).max() < 1e-4
        assert np.abs(of_base[0] - of_adapter[0]).max() > 0.01


def test_requests_without_their_adapter_fail_alone(served: Served) -> None:
    served.publish(served.packed(served.adapter(1), 1))
    request = GenerateRequest(input_ids=SEQUENCE, sampling=SamplingParams(max_tokens=60, seed=0), num_samples=4)

    async def evict_midway() -> list[Any]:
        engine = served.engine
        requests = [request, replace(request, adapter="base")]
        running = [asyncio.ensure_future(engine.generate(one)) for one in requests]
        await engine.generate(replace(request, num_samples=1, sampling=SamplingParams(max_tokens=1)))
        await engine._call(served.core.collective_rpc, lambda worker: manager_of(worker).remove_all_adapters())
        return await asyncio.gather(*running, engine.score([SEQUENCE]), return_exceptions=True)

    lost, of_base, scored = asyncio.run(evict_midway())
    for error in (lost, scored):
        assert isinstance(error, EngineError)
        assert "slots of adapters must contain [1, None]; found [None, None]. Publish the weights again." in str(error)
    assert [len(sample.token_ids) > 0 for sample in of_base] == [True] * 4
    with refuses("found [None, None]"):
        asyncio.run(served.engine.generate(request))
    served.publish(served.packed(served.adapter(1), 2))
    assert asyncio.run(served.engine.generate(request))[0].policy_versions[0] == 2


NUM_FAULTS = 14
"""Number of faults of each kind."""


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_faults_are_caught_and_named(
    kind: Callable[[Fault], None], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = served.core
    ask, reset = core.collective_rpc, core.reset_prefix_cache
    served.publish(served.packed(served.adapter(0), 0))
    for number in range(NUM_FAULTS):
        fault = Fault(served, number)
        kind(fault)
        update = served.packed(fault.tensors, fault.version)

        def ask_wrongly(asked: str, *, fault: Fault = fault, **rest: Any) -> Any:
            is_it = asked == "replace_adapter"
            answer = ask(fault.instead) if is_it and fault.instead is not None else ask(asked, **rest)
            if is_it and fault.after is not None:
                ask(torch.inference_mode()(fault.after))
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(core, "collective_rpc", ask_wrongly)
            patch.setattr(core, "reset_prefix_cache", fault.reset or reset)
            receipt = asyncio.run(served.engine.update_weights(update))
        with pytest.raises(WeightProofError) as raised:
            check_receipt(update, receipt, tolerances=ProofTolerances())
        assert fault.named in (raised.value.tensor, str(raised.value)) or fault.named in str(raised.value)
        if kind is base_changed:
            served.restore()
        served.publish(update)


def test_faults_of_prompt_sharing_and_of_waiting_requests_are_named(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.publish(served.packed(served.adapter(1), 1))
    update = served.packed(served.adapter(2), 2)
    request = GenerateRequest(input_ids=SEQUENCE, sampling=SamplingParams(max_tokens=60, seed=0), num_samples=2)

    def lose(adapter: Any, running: Sequence[tuple[Sample, Any]]) -> None:
        """Switch to the new adapter in the scheduler, and to none in the worker."""
        follow(adapter, running)
        lost = {vllm_request.request_id: None for _, vllm_request in running}
        served.core.collective_rpc("with_adapter", args=("follow", lost))

    async def update_midway(follow: Any) -> tuple[str, ...]:
        engine, core = served.engine, served.core
        running = asyncio.ensure_future(engine.generate(request))
        await engine.generate(short_request(seed=0))
        with monkeypatch.context() as patch:
            patch.setattr(core.scheduler.connector, "reset_cache", lambda: True)
            patch.setattr(kind, "_follow", follow)
            receipt, _ = await asyncio.gather(engine.update_weights(update), engine.abort(None))  # no step between
        await running
        problems: tuple[str, ...] = receipt.problems
        return problems

    kind = type(served.engine._stepper._adapters)  # type: ignore[union-attr]
    follow = kind._follow
    problems = asyncio.run(update_midway(lambda *_: None))
    assert "1 samples of the previous weights still share their prompts." in problems
    assert sum("is served by 'policy@1', not 'policy@2'" in problem for problem in problems) == 4, (
        "scheduler and worker"
    )
    served.publish(update)
    problems = asyncio.run(update_midway(lose))
    assert sum("is served by 'the base', not 'policy@2'" in problem for problem in problems) == 2
    served.publish(update)


def test_an_update_of_all_weights_leaves_no_adapter(served: Served) -> None:
    served.publish(served.packed(served.adapter(1), 1))
    full = merged(served.weights, served.adapter(2))
    update = TensorTransport().pack(full, version=2, tied=TIED_HEAD)
    receipt = asyncio.run(served.engine.update_weights(update))
    assert check_receipt(update, receipt, tolerances=ProofTolerances()) < 1e-5
    assert not [name for name in receipt.live if "lora" in name]
    assert served.core.list_loras() == set()
