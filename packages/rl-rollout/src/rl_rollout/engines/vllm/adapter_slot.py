"""The adapter in a slot of vLLM's wrapped layers: replaced in memory, and read back bit for bit.

vLLM has no public way to replace an adapter without a file. A wrapped layer keeps A and B of each Hugging Face matrix
by slot, padded to the maximum rank. Slot 1 stays empty, because vLLM's CPU products apply the last slot to rows without
an adapter.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import MethodType
from typing import Any

import numpy as np
import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.linear import RowParallelLinear

from rl_core.errors import EngineError
from rl_core.weights import LORA_A, LORA_B, PEFT_PREFIX, probe_vector, tensor_checksum
from rl_rollout.engines.vllm.live_weights import LivePart, LiveParts, input_range, num_copies, num_parts, part_index
from rl_rollout.engines.vllm.mixtures import loader_names
from rl_rollout.engines.weight_checks import module_of

ADAPTER_ID = 1
"""vLLM's id of this package's adapter."""
NUM_SLOTS = 2
SLOT = 0


class AdaptedPart:
    """The place where one rank keeps A and B of one Hugging Face matrix.

    Attributes:
        layer: vLLM's wrapper.
        rows: This rank's rows of B.
        columns: This rank's columns of `A`.
    """

    def __init__(self, layer: Any, index: int) -> None:
        """Find this rank's part.

        Args:
            layer: vLLM's wrapper.
            index: Index of the matrix among those that the layer joins.
        """
        base, size = layer.base_layer, int(layer.lora_b_stacked[index].shape[2])
        first, last, self._num_columns = input_range(base)
        num_row_parts = 1 if isinstance(base, RowParallelLinear) else num_parts(base, index)
        row = part_index(base, index) * size if num_row_parts > 1 else 0
        self.layer, self._index = layer, index
        self.rows, self.columns = slice(row, row + size), slice(first, last)
        self._num_rows = size * num_row_parts
        self._are_rows_split, self._are_columns_split = num_row_parts > 1, last - first < self._num_columns
        self._is_copy = num_row_parts > 1 and base.tp_rank % num_copies(base, index) > 0

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the live layer's [slots, max rank, in] and [slots, out, max rank]."""
        return self.layer.lora_a_stacked[self._index][:, 0], self.layer.lora_b_stacked[self._index][:, 0]

    def read(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's live part of A and B, including any padding that is not zero."""
        a, b = (tensor[SLOT] for tensor in self.slots())
        return a if _has_numbers(a[rank:]) else a[:rank], b if _has_numbers(b[:, rank:]) else b[:, :rank]

    def probe_a(self, held: torch.Tensor) -> LivePart:
        """Return this rank's share of the probe of `A`."""
        values = held.float() @ _vector(self._num_columns)[self.columns].to(held.device)
        return _share(values, is_summand=self._are_columns_split)

    def probe_b(self, held: torch.Tensor) -> LivePart:
        """Return this rank's share of the probe of B. Only the first of several ranks with the same rows returns it."""
        values = held.float().T @ _vector(self._num_rows)[self.rows].to(held.device)
        return _share(values * 0 if self._is_copy else values, is_summand=self._are_rows_split)


class AdapterSlot:
    """One worker's adapter."""

    def __init__(self, runner: Any) -> None:
        """Find the wrapped layers of vLLM's model runner.

        Raises:
            EngineError: A layer has a type that cannot be read back.
        """
        self._runner = runner
        self._manager = runner.lora_manager._adapter_manager
        self._vllm_name = loader_names(runner.get_model())
        self._names: dict[str, str] = {}
        self._parts = dict(_adapted_parts(self._manager))
        self._version: int | None = None
        self._rank = 0
        self._sums: dict[str, str] = {}

    def replace(self, tensors: Mapping[str, torch.Tensor], version: int) -> dict[str, str]:
        """Serve this adapter instead of the last.

        Args:
            tensors: A and B by peft's names, B with the scaling.
            version: The policy version.

        Returns:
            Checksum of each tensor as it arrived.
        """
        sums: dict[str, str] = {}
        loras: dict[str, LoRALayerWeights] = {}
        rank, dtype = 0, self._manager.lora_config.lora_dtype
        for module in dict.fromkeys(map(module_of, tensors)):
            name, key = self._name(module), f"{PEFT_PREFIX}{module}"
            a, b = (tensors[key + end].detach().to("cpu", dtype, copy=True) for end in (LORA_A, LORA_B))
            rank, part = len(a), self._parts[name]
            sums[key + LORA_A], sums[key + LORA_B] = tensor_checksum(a[:, part.columns]), tensor_checksum(b[part.rows])
            loras[name] = LoRALayerWeights(name, rank, rank, a, b)
        self.drop()
        manager = self._manager
        manager.add_adapter(LoRAModel(ADAPTER_ID, rank, loras))
        manager.activate_adapter(ADAPTER_ID)
        manager.pin_adapter(ADAPTER_ID)
        self._version, self._rank, self._sums = version, rank, sums
        is_whole = all(layer.tp_size == 1 for layer in manager.modules.values())
        if is_whole and all(tensor.dtype == dtype for tensor in tensors.values()):
            return sums
        return {name: tensor_checksum(tensor, "crc32c") for name, tensor in tensors.items()}

    def drop(self) -> None:
        """Serve no adapter, and clear the slots."""
        self._manager.remove_all_adapters()
        for layer in self._manager.modules.values():
            layer.reset_lora(SLOT + 1)  # the other one is reset on use
        self._version, self._sums = None, {}

    def follow(self, loras: Mapping[str, Any]) -> None:
        """Serve running requests with this adapter, or with none, by vLLM's id."""
        for request_id, lora_request in loras.items():
            if request_id in self._runner.requests:  # others have not been in a step
                self._runner.requests[request_id].lora_request = lora_request

    def live_parts(self) -> LiveParts:
        """Return this rank's live part of each adapter tensor. NaN if it differs from what arrived, bit for bit."""
        parts: LiveParts = {}
        for module in dict.fromkeys(module_of(name) for name in self._sums):
            part, key = self._parts[self._name(module)], f"{PEFT_PREFIX}{module}"
            a, b = part.read(self._rank)
            for name, held, probe in ((key + LORA_A, a, part.probe_a), (key + LORA_B, b, part.probe_b)):
                if tensor_checksum(held, "crc32c") == self._sums[name]:
                    parts[name] = [probe(held)]
                else:
                    unlike = np.full(self._rank, np.nan, np.float32)
                    parts[name] = [LivePart(values=unlike, start=0, num_rows=self._rank)]
        return parts

    def absence(self, version: int | None) -> str | None:
        """Return why requests of this version's adapter cannot be served. Cheap enough for every step."""
        expected = [None if version is None else ADAPTER_ID, *[None] * (NUM_SLOTS - 1)]
        slots = self._manager.lora_index_to_id
        if slots != expected:
            return f"vLLM's slots of adapters must contain {expected}; found {slots}."
        if self._version != version:
            return f"the adapter of version {version} must be served; found {self._version}."
        if version is not None and ADAPTER_ID not in self._manager._registered_adapters:
            return f"the adapter of version {version} is no longer registered."
        return None

    def problems(self, version: int | None) -> list[str]:
        """Describe all problems other than the tensors in `live_parts`."""
        absence = self.absence(version)
        found = [] if absence is None else [absence]
        manager = self._manager
        for adapters in (manager._registered_adapters, manager._active_adapters):
            if set(adapters.cache) != ({ADAPTER_ID} & adapters.pinned_items if version is not None else set()):
                found.append(f"vLLM has the adapters {sorted(adapters.cache)}, pinned {sorted(adapters.pinned_items)}.")
                break
        named = {self._name(module_of(name)) for name in self._sums}
        for name, part in self._parts.items():
            a, b = part.slots()
            if _has_numbers(a[SLOT + 1 :]) or _has_numbers(b[SLOT + 1 :]):
                found.append(f"slot {SLOT + 1}, which must stay empty, has numbers of {name}.")
            if version is not None and name not in named and (_has_numbers(a[SLOT]) or _has_numbers(b[SLOT])):
                found.append(f"{name} serves an adapter, but version {version} has none for it.")
        return found

    def misled(self, expected: Mapping[str, str | None]) -> Iterator[str]:
        """Describe running requests with the wrong adapter, as recorded by this worker.

        Args:
            expected: Name of each request's adapter by vLLM's id; None if the base serves it.
        """
        for request_id in expected.keys() & self._runner.requests.keys():
            yield from wrong_adapter(request_id, self._runner.requests[request_id].lora_request, expected[request_id])

    def served(self, modules: Iterable[str]) -> list[str]:
        """Return the Hugging Face modules among these that an adapter may change here."""
        return [module for module in modules if self._name(module) in self._parts]

    def _name(self, module: str) -> str:
        if module not in self._names:
            self._names[module] = self._vllm_name(f"{module}.weight").removesuffix(".weight")
        return self._names[module]


def _adapted_parts(manager: Any) -> Iterator[tuple[str, AdaptedPart]]:
    for path, layer in manager.modules.items():
        parent, _, own = path.rpartition(".")
        names = manager.packed_modules_mapping.get(own) or [own]
        if not isinstance(layer, BaseLinearLayerWithLoRA) or len(names) != layer.n_slices:
            raise EngineError(
                f"{path}: vLLM's {type(layer).__name__} cannot be read back, so an adapter in it could not be proven. "
                "Remove it from lora_target_modules."
            )
        for index, name in enumerate(names):
            yield f"{parent}.{name}", AdaptedPart(layer, index)


def wrong_adapter(request_id: str, found: Any, expected: str | None) -> Iterator[str]:
    """Describe a running request with another adapter than expected. `found` is vLLM's LoRARequest, or None."""
    name = None if found is None else found.lora_name
    if name != expected:
        yield f"request {request_id} is served by {name or 'the base'!r}, not {expected or 'the base'!r}."


@lru_cache(maxsize=32)
def _vector(size: int) -> torch.Tensor:
    return probe_vector(size)


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Return True if an element is not zero. Several times as fast as `any`."""
    return tensor.numel() > 0 and (tensor.amax().item() != 0 or tensor.amin().item() != 0)


def _share(values: torch.Tensor, *, is_summand: bool) -> LivePart:
    return LivePart(values=values.cpu().numpy(), start=0, num_rows=len(values), is_summand=is_summand)


def multiply_at_once(runner: Any) -> None:
    """Make the wrapped layers of a worker's model runner multiply with `add_adapter`."""
    for wrapper in runner.lora_manager._adapter_manager.punica_wrapper_mapping.values():
        wrapper.add_lora_linear = MethodType(add_adapter, wrapper)


def add_adapter(
    wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Replace `PunicaWrapperCPU.add_lora_linear` for the only adapter that has a slot.

    Args:
        wrapper: vLLM's wrapper, which knows the slot of each token.
        y: [tokens, out]. scale * x @ A.T @ B.T is added in place, for tokens with the adapter.
        x: [tokens, in].
        lora_a_stacked: [slots, 1, rank, in] for each part of the output.
        lora_b_stacked: [slots, 1, part, rank].
        scale: Factor of the product.
        output_slices: Sizes of the output's parts.
    """
    if wrapper.no_lora:
        return
    slots = wrapper.token_lora_indices
    has_adapter = None if wrapper.batch_size == 1 else (slots == SLOT).to(x.dtype).unsqueeze(-1)
    start = 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        low = x @ a[SLOT, 0].T
        if has_adapter is not None:
            low *= has_adapter
        y[:, start : start + size].addmm_(low, b[SLOT, 0].T, alpha=scale)
        start += size
