"""Faults of an adapter in a vLLM engine of this process."""

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from rl_core.weights import AdapterUpdate, ProofTolerances, TensorTransport, WeightUpdate, check_receipt, digest_tensors
from rl_core.weights.digests import LORA_A, LORA_B, PEFT_PREFIX
from rl_rollout.engines.protocol import GenerateRequest, SamplingParams
from rl_rollout.engines.vllm import VLLMEngine
from rl_rollout.engines.weight_checks import module_of
from rl_rollout.testing.reference_model import TIED_HEAD, make_adapter, perturbed

RANK = 4
"""Rank of vLLM's slots."""
Tensors = dict[str, torch.Tensor]


class Served:
    """An engine with the folder's weights, and the updates published to it."""

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


def manager_of(worker: Any) -> Any:
    return worker.worker.model_runner.lora_manager._adapter_manager


class Fault:
    """A fault in the engine with one update, drawn by a number.

    Attributes:
        update: The published update.
        instead: Replaces the worker's loading of the adapter; None loads it correctly.
        after: Changes the worker afterwards.
        reset: Replaces the reset of the caches.
        named: Text of the proof's error, or the tensor that it must name.
    """

    def __init__(self, served: Served, number: int) -> None:
        self.draw = random.Random(number)
        self.served, self.version = served, number + 1
        self.tensors = served.adapter(number + 1)
        self.name = self.draw.choice(sorted(self.tensors))
        self.instead: Callable[[Any], Any] | None = None
        self.after: Callable[[Any], Any] | None = None
        self.reset: Callable[..., bool] | None = None
        self.named = self.name

    def slots(self, worker: Any, name: str) -> torch.Tensor:
        """Return the live tensor with this name, for all slots: [slots, ...]."""
        part = worker.worker._adapter_slots._parts[module_of(name)]
        found: torch.Tensor = part.slots()[name.endswith(LORA_B)]
        return found

    def whole(self, worker: Any) -> list[torch.Tensor]:
        return [tensor for part in worker.worker._adapter_slots._parts.values() for tensor in part.slots()]


def not_delivered(fault: Fault) -> None:
    sums = {name: digest.checksum for name, digest in fault.served.packed(fault.tensors, 0).digests.items()}
    fault.instead = lambda worker: sums
    fault.named = "must be served"


def delivered_to_the_other_slot(fault: Fault) -> None:
    def move(worker: Any) -> None:
        manager_of(worker).lora_index_to_id.reverse()
        for tensor in fault.whole(worker):
            tensor.copy_(tensor.flip(0))

    fault.after, fault.named = move, "must contain [1, None]; found [None, 1]"


def delivered_to_both_slots(fault: Fault) -> None:
    def fill(worker: Any) -> None:
        slots = fault.slots(worker, fault.name)
        slots[1] = slots[0]

    fault.after, fault.named = fill, f"slot 1, which must stay empty, has numbers of {module_of(fault.name)}"


def evicted(fault: Fault) -> None:
    fault.after = lambda worker: manager_of(worker).remove_adapter(1)
    fault.named = "found [None, None]"


def left_to_be_evicted(fault: Fault) -> None:
    fault.after = lambda worker: manager_of(worker)._registered_adapters.pinned_items.clear()
    fault.named = "vLLM has the adapters [1], pinned []"


def beside_another(fault: Fault) -> None:
    def add(worker: Any) -> None:
        manager = manager_of(worker)
        manager.add_adapter(manager.get_adapter(1).clone(2))

    fault.after, fault.named = add, "vLLM has the adapters [1, 2]"


def of_the_version_before(fault: Fault) -> None:
    fault.instead = lambda worker: worker.worker.replace_adapter(fault.tensors, fault.version - 1)
    fault.named = f"the adapter of version {fault.version} must be served; found {fault.version - 1}."


def with_the_tensors_before(fault: Fault) -> None:
    old = fault.served.adapter(fault.version - 1)
    fault.instead = lambda worker: worker.worker.replace_adapter(old, fault.version)
    fault.named = "was changed in transit to the engine"


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
    """Corrupt k or v, which share q's matrix, when only q has an adapter."""
    fault.tensors = fault.served.adapter(fault.version, kinds=("q_proj", "down_proj"))
    layer, kind = fault.draw.randrange(2), fault.draw.choice(["k_proj", "v_proj"])
    module = f"model.layers.{layer}.self_attn.{kind}"
    fault.after = lambda worker: fault.slots(worker, f"{PEFT_PREFIX}{module}{LORA_B}")[0, 3, 1].fill_(0.1)
    fault.named = f"{module} serves an adapter, but version {fault.version} has none for it"


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
    fault.reset = lambda **_: True
    fault.named = "blocks of the previous weights are still in the prefix cache"


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
