"""vLLM with adapters: conformance, peft as the oracle, and faults that its proof must name."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_core.errors import EngineError, WeightProofError
from rl_core.weights import AdapterUpdate, ProofTolerances, TensorTransport, WeightUpdate, check_receipt, digest_tensors
from rl_core.weights.broadcast import BroadcastTransport
from rl_core.weights.transports import SharedFileTransport
from rl_core.weights.update import LORA_A, LORA_B, PEFT_PREFIX
from rl_rollout.engines.protocol import GenerateRequest, SamplingParams
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.engines.weight_checks import module_of
from rl_rollout.testing import AdapterChecks
from rl_rollout.testing.adapter_checks import SEQUENCE
from rl_rollout.testing.engine_calls import refuses
from rl_rollout.testing.reference_model import TIED_HEAD, make_adapter, merged, perturbed, token_logprobs

pytest.importorskip("vllm")

RANK = 4
"""vLLM's slots are of rank 8."""
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def adapted_vllm(tied_model_dir: Path, learner_process_group: None) -> Iterator[VLLMEngine]:
    """Each test leaves it serving tied_model_dir as version 0."""
    options = VLLMOptions(
        max_model_len=128, max_num_seqs=64, max_num_batched_tokens=192, kv_cache_gib=0.004, max_lora_rank=RANK
    )
    engine = VLLMEngine(tied_model_dir, options)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


class OfAdapters(AdapterChecks):
    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, adapted_vllm: VLLMEngine) -> VLLMEngine:
        return adapted_vllm


class TestVLLMAdapters(OfAdapters):
    pass


@pytest.mark.parametrize("transport", [SharedFileTransport, BroadcastTransport])
def test_adapters_come_by_file_and_over_the_network(
    transport: Any, adapted_vllm: VLLMEngine, tied_model_dir: Path
) -> None:
    suite = AdapterChecks()
    suite.transport = transport
    suite.test_each_adapter_replaces_the_last_on_the_same_base(adapted_vllm, tied_model_dir)


class Served:
    """An engine with the folder's weights, and what is published to it."""

    def __init__(self, engine: VLLMEngine, folder: Path) -> None:
        self.engine = engine
        self.weights = load_file(folder / "model.safetensors")
        self._base = digest_tensors(self.weights)

    @property
    def core(self) -> Any:
        return self.engine._stepper._core  # type: ignore[union-attr] # vLLM's stepper

    def adapter(self, seed: int, **changes: Any) -> Tensors:
        return make_adapter(self.weights, rank=RANK, seed=seed, **changes)

    def packed(self, tensors: Mapping[str, torch.Tensor], version: int) -> WeightUpdate:
        told = AdapterUpdate(rank=RANK, base=self._base)
        return TensorTransport().pack(tensors, version=version, tied=TIED_HEAD, adapter=told)

    def publish(self, update: WeightUpdate) -> None:
        receipt = asyncio.run(self.engine.update_weights(update))
        check_receipt(update, receipt, tolerances=ProofTolerances())

    def restore(self) -> None:
        self.publish(TensorTransport().pack(self.weights, version=0, tied=TIED_HEAD))


@pytest.fixture
def served(adapted_vllm: VLLMEngine, tied_model_dir: Path) -> Iterator[Served]:
    found = Served(adapted_vllm, tied_model_dir)
    yield found
    found.restore()


def test_peft_says_the_same_after_five_updates(served: Served, tied_model_dir: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tied_model_dir, dtype=torch.float32, local_files_only=True)
    config = LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules="all-linear")
    oracle = get_peft_model(model, config)
    live = {name.replace(".default.", "."): tensor for name, tensor in oracle.named_parameters() if "lora_" in name}
    last = np.zeros(len(SEQUENCE) - 1)
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
        assert np.abs(found[1:] - expected).max() < 1e-4
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
        assert np.ptp(of_base) < 1e-4
        assert np.ptp(of_adapter) < 1e-4
        assert abs(of_base[0, 0] - of_adapter[0, 0]) > 0.01


def test_requests_without_their_adapter_fail_alone(served: Served) -> None:
    served.publish(served.packed(served.adapter(1), 1))
    request = GenerateRequest(input_ids=SEQUENCE, sampling=SamplingParams(max_tokens=60, seed=0), num_samples=4)

    async def evict_midway() -> list[Any]:
        engine = served.engine
        requests = [request, replace(request, adapter="base")]
        running = [asyncio.ensure_future(engine.generate(one)) for one in requests]
        await engine.generate(replace(request, num_samples=1, sampling=SamplingParams(max_tokens=1)))
        await engine.pause()
        served.core.collective_rpc(lambda worker: manager_of(worker).remove_all_adapters())
        await engine.resume()
        return await asyncio.gather(*running, engine.score([SEQUENCE]), return_exceptions=True)

    lost, of_base, scored = asyncio.run(evict_midway())
    for error in (lost, scored):
        assert isinstance(error, EngineError)
        assert "slots of adapters must hold [1, None]; they hold [None, None]. Publish the weights again." in str(error)
    assert [len(sample.token_ids) > 0 for sample in of_base] == [True] * 4
    with refuses("they hold [None, None]"):
        asyncio.run(served.engine.generate(request))
    served.publish(served.packed(served.adapter(1), 2))
    assert asyncio.run(served.engine.generate(request))[0].policy_versions[0] == 2


# Faults. Each is a function of the fixture's parts; what it returns must stand in the proof's error.


def manager_of(worker: Any) -> Any:
    return worker.worker.model_runner.lora_manager._adapter_manager


class Fault:
    """What goes wrong in the engine with one update, drawn by a number.

    Attributes:
        update: That is published.
        instead: What the worker does when it is given the adapter; None takes it as it must.
        after: What happens to the worker afterwards.
        named: What the proof's error must say, or the tensor that it must name.
    """

    def __init__(self, served: Served, number: int) -> None:
        self.draw = random.Random(number)
        self.served, self.version = served, number + 1
        self.tensors = served.adapter(number + 1)
        self.name = self.draw.choice(sorted(self.tensors))
        self.instead: Callable[[Any], Any] | None = None
        self.after: Callable[[Any], Any] | None = None
        self.reset: Callable[[Any, bool], bool] | None = None
        self.named = self.name

    def slots(self, worker: Any, name: str) -> torch.Tensor:
        """[slots, ...] of the live tensor of this name."""
        part = worker.worker._adapter_slot._parts[module_of(name)]
        return part.slots()[name.endswith(LORA_B)]

    def whole(self, worker: Any) -> list[torch.Tensor]:
        return [tensor for part in worker.worker._adapter_slot._parts.values() for tensor in part.slots()]


def not_delivered(fault: Fault) -> None:
    sums = {name: digest.crc32c for name, digest in fault.served.packed(fault.tensors, 0).digests.items()}
    fault.instead = lambda worker: sums
    fault.named = "must be served"


def delivered_to_the_other_slot(fault: Fault) -> None:
    def move(worker: Any) -> None:
        manager_of(worker).lora_index_to_id.reverse()
        for tensor in fault.whole(worker):
            tensor.copy_(tensor.flip(0))

    fault.after, fault.named = move, "must hold [1, None]; they hold [None, 1]"


def delivered_to_both_slots(fault: Fault) -> None:
    def fill(worker: Any) -> None:
        slots = fault.slots(worker, fault.name)
        slots[1] = slots[0]

    fault.after, fault.named = fill, f"slot 1, which stays empty, holds numbers of {module_of(fault.name)}"


def evicted(fault: Fault) -> None:
    fault.after = lambda worker: manager_of(worker).remove_adapter(1)
    fault.named = "they hold [None, None]"


def left_to_be_evicted(fault: Fault) -> None:
    fault.after = lambda worker: manager_of(worker)._registered_adapters.pinned_items.clear()
    fault.named = "vLLM holds the adapters [1], pinned []"


def beside_another(fault: Fault) -> None:
    def add(worker: Any) -> None:
        manager = manager_of(worker)
        manager.add_adapter(manager.get_adapter(1).clone(2))

    fault.after, fault.named = add, "vLLM holds the adapters [1, 2]"


def of_the_version_before(fault: Fault) -> None:
    fault.instead = lambda worker: worker.worker.replace_adapter(fault.tensors, fault.version - 1)
    fault.named = f"the adapter of version {fault.version} must be served; {fault.version - 1} is"


def with_the_tensors_before(fault: Fault) -> None:
    old = fault.served.adapter(fault.version - 1)
    fault.instead = lambda worker: worker.worker.replace_adapter(old, fault.version)
    fault.named = "was changed on its way to the engine"


def scaled_twice(fault: Fault) -> None:
    fault.named = fault.name = f"{PEFT_PREFIX}{module_of(fault.name)}{LORA_B}"
    fault.after = lambda worker: fault.slots(worker, fault.name)[0].mul_(2)


def one_element_flipped(fault: Fault) -> None:
    def flip(worker: Any) -> None:
        live = fault.slots(worker, fault.name)[0]
        live = live[:RANK] if fault.name.endswith(LORA_A) else live[:, :RANK]
        row, column = (fault.draw.randrange(size) for size in live.shape)
        live.view(torch.int32)[row, column] ^= 1  # its lowest bit

    fault.after = flip


def of_another_layer(fault: Fault) -> None:
    other = fault.name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")
    fault.after = lambda worker: fault.slots(worker, fault.name).copy_(fault.slots(worker, other))


def not_zeroed(fault: Fault) -> None:
    """k and v share a matrix with q, and only q has an adapter."""
    fault.tensors = fault.served.adapter(fault.version, kinds=("q_proj", "down_proj"))
    layer, kind = fault.draw.randrange(2), fault.draw.choice(["k_proj", "v_proj"])
    module = f"model.layers.{layer}.self_attn.{kind}"
    fault.after = lambda worker: fault.slots(worker, f"{PEFT_PREFIX}{module}{LORA_B}")[0, 3, 1].fill_(0.1)
    fault.named = f"{module} serves an adapter, and version {fault.version} has none for it"


def padding_not_zero(fault: Fault) -> None:
    def fill(worker: Any) -> None:
        live = fault.slots(worker, fault.name)[0]
        (live[RANK:] if fault.name.endswith(LORA_A) else live[:, RANK:])[0, 0] = 0.1

    fault.after = fill


def base_changed(fault: Fault) -> None:
    fault.named = fault.draw.choice(sorted(fault.served.weights))
    changed = {**fault.served.weights, fault.named: perturbed(fault.served.weights, scale=0.01)[fault.named]}

    def change(worker: Any) -> Any:
        worker.worker.replace_all_weights(changed, [])
        return worker.worker.replace_adapter(fault.tensors, fault.version)

    fault.instead = change


def stale_cache(fault: Fault) -> None:
    prompt = np.array([fault.draw.randrange(2, 32) for _ in range(70)], np.int32)
    request = GenerateRequest(input_ids=prompt, sampling=SamplingParams(max_tokens=2, seed=0))
    asyncio.run(fault.served.engine.generate(request))
    fault.reset = lambda _running, _connector: True
    fault.named = "blocks of keys and values of the weights before are still in the prefix cache"


FAULTS = (
    not_delivered,
    delivered_to_the_other_slot,
    delivered_to_both_slots,
    evicted,
    left_to_be_evicted,
    beside_another,
    of_the_version_before,
    with_the_tensors_before,
    scaled_twice,
    one_element_flipped,
    of_another_layer,
    not_zeroed,
    padding_not_zero,
    base_changed,
    stale_cache,
)
NUM_FAULTS = 14
"""Of each kind."""


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

    async def update_midway() -> tuple[str, ...]:
        engine, core = served.engine, served.core
        running = asyncio.ensure_future(engine.generate(request))
        await engine.generate(replace(request, num_samples=1, sampling=SamplingParams(max_tokens=1)))
        await engine.pause()
        with monkeypatch.context() as patch:
            patch.setattr(core.scheduler.connector, "reset_cache", lambda: True)
            patch.setattr(type(engine._stepper._adapter), "_follow", lambda *_: None)  # type: ignore[union-attr]
            receipt = await engine.update_weights(update)
        await engine.abort_all()
        await running
        await engine.resume()
        return receipt.problems

    problems = asyncio.run(update_midway())
    assert "1 samples of the weights before still share their prompts." in problems
    assert sum("is served by 'policy@1', not 'policy@2'" in problem for problem in problems) == 2
    served.publish(update)


def test_an_update_of_all_weights_leaves_no_adapter(served: Served) -> None:
    served.publish(served.packed(served.adapter(1), 1))
    full = merged(served.weights, served.adapter(2))
    update = TensorTransport().pack(full, version=2, tied=TIED_HEAD)
    receipt = asyncio.run(served.engine.update_weights(update))
    assert check_receipt(update, receipt, tolerances=ProofTolerances()) < 1e-5
    assert not [name for name in receipt.live if "lora" in name]
    assert served.core.list_loras() == set()
