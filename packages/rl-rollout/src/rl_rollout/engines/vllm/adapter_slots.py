"""Adapters in the slots of vLLM's wrapped layers: replaced in memory, and read back bit for bit.

vLLM has no public way to replace an adapter without a file. A wrapped layer keeps A and B of each Hugging Face matrix
by slot, padded to the maximum rank. The adapter with vLLM's id n is in slot n - 1. The last slot stays empty, because
vLLM's CPU products apply it to rows without an adapter.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
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

FIRST_ID = 1
"""vLLM's id of the adapter in the first slot."""


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

    def read(self, slot: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's live part of A and B, including any padding that is not zero."""
        a, b = (tensor[slot] for tensor in self.slots())
        return a if _has_numbers(a[rank:]) else a[:rank], b if _has_numbers(b[:, rank:]) else b[:, :rank]

    def probe_a(self, held: torch.Tensor) -> LivePart:
        """Return this rank's share of the probe of `A`."""
        values = held.float() @ _vector(self._num_columns)[self.columns].to(held.device)
        return _share(values, is_summand=self._are_columns_split)

    def probe_b(self, held: torch.Tensor) -> LivePart:
        """Return this rank's share of the probe of B. Only the first of several ranks with the same rows returns it."""
        values = held.float().T @ _vector(self._num_rows)[self.rows].to(held.device)
        return _share(values * 0 if self._is_copy else values, is_summand=self._are_rows_split)


@dataclass(frozen=True, slots=True)
class _Held:
    """An adapter in a slot.

    Attributes:
        version: Its policy version.
        rank: Its rank.
        sums: Checksum of this rank's part of each tensor as it arrived.
    """

    version: int
    rank: int
    sums: Mapping[str, str]


class AdapterSlots:
    """One worker's adapters, by vLLM's ids."""

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
        self._held: dict[int, _Held] = {}
        self._num_slots: int = self._manager.lora_slots

    def replace(self, tensors: Mapping[str, torch.Tensor], version: int, adapter_id: int) -> dict[str, str]:
        """Serve this adapter instead of the last one with its id.

        Args:
            tensors: A and B by peft's names, B with the scaling.
            version: The policy version.
            adapter_id: vLLM's id of the adapter.

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
        self.drop(adapter_id)
        manager = self._manager
        manager.add_adapter(LoRAModel(adapter_id, rank, loras))
        manager.lora_index_to_id = [None if one == adapter_id else one for one in self._ids]  # vLLM takes a free slot
        manager.activate_adapter(adapter_id)
        manager.pin_adapter(adapter_id)
        self._held[adapter_id] = _Held(version, rank, sums)
        manager.lora_index_to_id = self._table(self._held)
        is_whole = all(layer.tp_size == 1 for layer in manager.modules.values())
        if is_whole and all(tensor.dtype == dtype for tensor in tensors.values()):
            return sums
        return {name: tensor_checksum(tensor, "crc32c") for name, tensor in tensors.items()}

    def drop(self, adapter_id: int | None = None) -> None:
        """Serve this adapter no longer, or none at all, and remove those that nobody published."""
        self._held.pop(adapter_id or 0, None)
        if adapter_id is None:
            self._held.clear()
        manager = self._manager
        for other in {*manager._registered_adapters.cache, *manager._active_adapters.cache} - self._held.keys():
            manager.remove_adapter(other)
        if not self._held:
            manager.remove_all_adapters()
        manager.lora_index_to_id = self._table(self._held)
        for layer in manager.modules.values():
            layer.reset_lora(self._num_slots - 1)  # others are reset on use

    @property
    def _ids(self) -> range:
        return range(FIRST_ID, FIRST_ID + self._num_slots)

    def _table(self, ids: Container[int]) -> list[int | None]:
        """Return vLLM's table of slots with these adapters."""
        return [one if one in ids else None for one in self._ids]

    def follow(self, loras: Mapping[str, Any]) -> None:
        """Serve running requests with this adapter, or with none, by vLLM's id."""
        for request_id, lora_request in loras.items():
            if request_id in self._runner.requests:  # others have not been in a step
                self._runner.requests[request_id].lora_request = lora_request

    def live_parts(self, adapter_id: int) -> LiveParts:
        """Return this rank's live part of an adapter's tensors. NaN if it differs from what arrived, bit for bit."""
        parts: LiveParts = {}
        held = self._held.get(adapter_id, _Held(0, 0, {}))
        for module in dict.fromkeys(map(module_of, held.sums)):
            part, key = self._parts[self._name(module)], f"{PEFT_PREFIX}{module}"
            a, b = part.read(adapter_id - FIRST_ID, held.rank)
            for name, live, probe in ((key + LORA_A, a, part.probe_a), (key + LORA_B, b, part.probe_b)):
                if tensor_checksum(live, "crc32c") == held.sums[name]:
                    parts[name] = [probe(live)]
                else:
                    unlike = np.full(held.rank, np.nan, np.float32)
                    parts[name] = [LivePart(values=unlike, start=0, num_rows=held.rank)]
        return parts

    def absences(self, versions: Mapping[int, int]) -> dict[int, str]:
        """Return why requests of adapters cannot be served. Cheap enough for every step.

        Args:
            versions: Version of each published adapter, by vLLM's id.
        """
        slots, found = self._manager.lora_index_to_id, dict[int, str]()
        for adapter_id, version in versions.items():
            held = self._held.get(adapter_id)
            if slots[adapter_id - FIRST_ID] != adapter_id:
                found[adapter_id] = f"vLLM's slots of adapters must contain {self._table(versions)}; found {slots}."
            elif held is None or held.version != version:
                found[adapter_id] = (
                    f"the adapter of version {version} must be served; found {None if held is None else held.version}."
                )
            elif adapter_id not in self._manager._registered_adapters:
                found[adapter_id] = f"the adapter of version {version} is no longer registered."
        return found

    def problems(self, versions: Mapping[int, int]) -> list[str]:
        """Describe all problems other than the tensors in `live_parts`; see `absences`."""
        found = [*self.absences(versions).values()]
        manager = self._manager
        if not found and manager.lora_index_to_id != self._table(versions):
            slots = manager.lora_index_to_id
            found.append(f"vLLM's slots of adapters must contain {self._table(versions)}; found {slots}.")
        for adapters in (manager._registered_adapters, manager._active_adapters):
            if set(adapters.cache) != versions.keys() & adapters.pinned_items or len(adapters.cache) < len(versions):
                found.append(f"vLLM has the adapters {sorted(adapters.cache)}, pinned {sorted(adapters.pinned_items)}.")
                break
        named = {one: {self._name(module_of(name)) for name in held.sums} for one, held in self._held.items()}
        empty = self._num_slots - 1
        for name, part in self._parts.items():
            a, b = part.slots()
            if _has_numbers(a[empty]) or _has_numbers(b[empty]):
                found.append(f"slot {empty}, which must stay empty, has numbers of {name}.")
            for one, version in versions.items():
                slot = one - FIRST_ID
                if name not in named.get(one, ()) and (_has_numbers(a[slot]) or _has_numbers(b[slot])):
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
    """Replace `PunicaWrapperCPU.add_lora_linear`.

    Args:
        wrapper: vLLM's wrapper, which knows the slot of each token.
        y: [tokens, out]. scale * x @ A.T @ B.T of each token's adapter is added in place.
        x: [tokens, in].
        lora_a_stacked: [slots, 1, rank, in] for each part of the output.
        lora_b_stacked: [slots, 1, part, rank].
        scale: Factor of the product.
        output_slices: Sizes of the output's parts.
    """
    if wrapper.no_lora:
        return
    slots = wrapper.token_lora_indices
    if len(lora_a_stacked[0]) > 2:
        _add_adapters(slots, y, x, lora_a_stacked, lora_b_stacked, scale)
        return
    has_adapter = None if wrapper.batch_size == 1 else (slots == 0).to(x.dtype).unsqueeze(-1)
    start = 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        low = x @ a[0, 0].T
        if has_adapter is not None:
            low *= has_adapter
        y[:, start : start + size].addmm_(low, b[0, 0].T, alpha=scale)
        start += size


def _add_adapters(
    slots: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
) -> None:
    """Multiply the tokens of each adapter in the batch by themselves; see `add_adapter`."""
    for slot in torch.unique(slots).tolist():
        if slot < 0:  # the base
            continue
        rows = (slots == slot).nonzero().squeeze(-1)
        taken, start = x[rows], 0
        for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True):
            end = start + b.shape[2]
            y[:, start:end].index_add_(0, rows, taken @ a[slot, 0].T @ b[slot, 0].T, alpha=scale)
            start = end
