"""Experts of mixture-of-experts models in vLLM: packed again at each update, and read back bit for bit.

A layer keeps all of its experts in two tensors. On CPUs, these are padded and packed for the kernel, and the originals
are dropped. Packing only moves elements, so packing an index in the same way shows where each element came from.
Experts in other kernels are probed (`expert_probes.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from ctypes import CDLL
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm import __version__ as vllm_version
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import current_platform

from rl_core.data import FloatArray
from rl_core.errors import EngineError
from rl_core.weights import probe_vector, tensor_checksum
from rl_rollout.engines.vllm.expert_probes import AskedExpert, ask_of, why_not_asked

LIBC = CDLL(None)
READABLE = (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON)
"""Kernels with a known layout. Triton uses experts as loaded."""

_sums: "WeakKeyDictionary[torch.nn.Module, dict[tuple[int, str] | None, str]]" = WeakKeyDictionary()
"""Checksum of each layer's expected tensors after the last update, by expert and projection; None is its bias."""

_asked: "WeakKeyDictionary[torch.nn.Module, dict[int, AskedExpert]]" = WeakKeyDictionary()
"""For each layer that cannot be read, the experts of the last update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """One rank's part of one tensor of one expert.

    Attributes:
        layer: The layer of vLLM.
        expert: Index of the expert.
        projection: Its name in the checkpoint, such as "gate_proj".
    """

    layer: Any
    expert: int
    projection: str

    @property
    def dim(self) -> int:
        """The dimension along which ranks split the tensor: outputs for gate and up, inputs for down."""
        return int(self.projection == self.layer.ckpt_down_proj_name)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor."""
        config = self.layer.moe_config
        part: torch.Tensor = tensor.detach().tensor_split(config.tp_size, self.dim)[config.tp_rank]
        return part.to(self.layer.params_dtype)

    def read(self) -> torch.Tensor:
        """Return the live layer's tensor, [out, in]."""
        layer, config = self.layer, self.layer.moe_config
        weight: torch.Tensor = (layer.w2_weight if self.dim else layer.w13_weight)[self.expert]
        rows, columns = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
        if self.dim:
            rows, columns = columns, rows
        first = len(weight) // 2 if self.projection == layer.ckpt_up_proj_name else 0  # gate and up are each padded
        part = slice(first, first + rows), slice(columns)
        kernel = layer.quant_method.moe_kernel.fused_experts
        if layer.quant_method.unquantized_backend is not UnquantizedMoeBackend.CPU or kernel._use_zentorch:
            return weight[part]
        places = _places(tuple(weight.shape), weight.dtype, kernel.isa)[part]
        return weight.flatten().index_select(0, places.flatten()).view(places.shape)

    def expect(self, tensor: torch.Tensor) -> None:
        """Record the expected tensor when a whole tensor arrives."""
        part = self.of(tensor).to(current_platform.device_type)  # a layer has no device while it is loaded
        if _is_readable(self.layer):
            _sums.setdefault(self.layer, {})[self.expert, self.projection] = tensor_checksum(part)
            return
        expert = _asked.setdefault(self.layer, {}).setdefault(self.expert, AskedExpert())
        expert.arrive(self.projection, part, self._probe(part), _projections(self.layer))

    def read_probe(self) -> FloatArray:
        """Return this rank's rows of the live tensor's probe. NaN unless it equals what arrived, bit for bit.

        The tensors from the engine's start count as arrived when they are first read.
        """
        tensor = self.read()
        is_expected = _is_expected(self.layer, (self.expert, self.projection), tensor)
        return self._probe(tensor) if is_expected else self.unlike()

    def unlike(self) -> FloatArray:
        """Return NaN for each of this rank's rows."""
        config = self.layer.moe_config
        size = config.hidden_dim_unpadded if self.dim else config.intermediate_size_per_partition_unpadded
        return np.full(size, np.nan, np.float32)

    def _probe(self, tensor: torch.Tensor) -> FloatArray:
        config, size = self.layer.moe_config, tensor.shape[1]
        whole = size * config.tp_size if self.dim else size
        vector = probe_vector(whole)[config.tp_rank * size :][:size] if self.dim else probe_vector(whole)
        return (tensor.float() @ vector.to(tensor.device)).cpu().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasPart:
    """The bias that a layer's router adds to its scores to choose experts. Every rank has all of it.

    Attributes:
        layer: The layer of vLLM.
    """

    layer: Any

    def read(self) -> torch.Tensor:
        """Return the router's live [experts] float32 bias, regardless of the parameter that the gate has loaded."""
        bias: torch.Tensor = self.layer.router.e_score_correction_bias
        return bias.detach()

    def expect(self, tensor: torch.Tensor) -> None:
        """Record the expected tensor when one arrives."""
        _sums.setdefault(self.layer, {})[None] = tensor_checksum(tensor.float().to(current_platform.device_type))

    def is_expected(self, found: torch.Tensor) -> bool:
        """Return True if the live bias equals what arrived, bit for bit."""
        return _is_expected(self.layer, None, found.float())


def keep_cpu_experts() -> None:
    """Make vLLM use its CPU kernel for experts even with adapters, instead of Triton's GPU kernel."""
    select = unquantized_fused_moe_method.select_unquantized_moe_backend

    def select_without_adapters(moe_config: Any) -> Any:
        return select(replace(moe_config, is_lora_enabled=False))

    unquantized_fused_moe_method.select_unquantized_moe_backend = select_without_adapters


def bias_parts(path: str, layer: MoERunner) -> Iterator[tuple[str, BiasPart]]:
    """Return the bias of a layer's router, if it has one, by checkpoint name."""
    if getattr(layer.router, "e_score_correction_bias", None) is not None:
        yield f"{path.rpartition('.')[0]}.gate.e_score_correction_bias", BiasPart(layer=layer)


def expert_parts(path: str, layer: RoutedExperts) -> Iterator[tuple[str, ExpertPart]]:
    """Return all tensors of a layer's experts, by checkpoint name as the model's loader knows it."""
    prefix = path.removesuffix(".routed_experts")
    for expert in range(layer.local_num_experts):
        for name in _projections(layer):
            yield f"{prefix}.{expert}.{name}.weight", ExpertPart(layer=layer, expert=expert, projection=name)


def served_experts(path: str, layer: RoutedExperts) -> Iterator[tuple[str, ExpertPart, FloatArray]]:
    """Return this rank's rows of each expert tensor's probe; NaN if the layer serves other weights."""
    is_readable, wrong = _is_readable(layer), set[str]()
    if not is_readable and layer not in _asked:  # no update has arrived yet
        return
    first, *_, down = _projections(layer)
    for name, part in expert_parts(path, layer):
        if is_readable:
            yield name, part, part.read_probe()
            continue
        expert = _asked.get(layer, {}).get(part.expert, AskedExpert())
        if part.projection == first:  # one run for all three tensors
            held = dict.fromkeys(_projections(layer), tensor_checksum(layer.w13_weight[part.expert]))
            held[down] = tensor_checksum(layer.w2_weight[part.expert])
            wrong = expert.wrong(ask_of(layer, part.expert), held)
        yield name, part, part.unlike() if part.projection in wrong else expert.probes[part.projection]


def before_reload(model: torch.nn.Module) -> dict[Any, Any]:
    """Make the next reload pack experts. vLLM 0.32 on CPUs packs only those of layers without a kernel.

    Returns:
        The kernels that were removed, by the method that had them.

    Raises:
        EngineError: The model's experts could not be proven.
    """
    kernels: dict[Any, Any] = {}
    for path, layer in _routed(model):
        method = layer.quant_method
        backend = getattr(method, "unquantized_backend", None)
        reason = None if _is_readable(layer) and layer.moe_config.is_act_and_mul else why_not_asked(layer)
        if reason is not None:
            raise EngineError(
                f"{path}: vLLM computes these experts with {backend or type(method).__name__}, whose weights cannot "
                f"be read back, and which {reason}. An update could not be proven, and is refused. Serve the model on "
                "CPUs, or on a GPU where vLLM uses its Triton kernel."
            )
        if backend is UnquantizedMoeBackend.CPU and vllm_version.startswith("0.32."):
            kernels[method], method.moe_kernel = method.moe_kernel, None
    return kernels


def noted(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass an update's tensors on, and record the expected experts and biases.

    At the second layer, the allocator's cache of the first layer is returned to the system. A layer needs twice its own
    size while vLLM loads it; with another layer's cache, that would exceed a mixture of two layers. Later layers reuse
    the cache.
    """
    parts: dict[str, ExpertPart | BiasPart] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            parts.update(expert_parts(path, layer))
        elif isinstance(layer, MoERunner):
            parts.update(bias_parts(path, layer))
    vllm_name, layers = loader_names(model), set[int]()
    for name, tensor in tensors:
        if part := parts.get(vllm_name(name)):
            if isinstance(part, ExpertPart):
                if id(part.layer) not in layers and len(layers) == 1 and hasattr(LIBC, "malloc_trim"):
                    LIBC.malloc_trim(0)
                layers.add(id(part.layer))
            part.expect(tensor)
        yield name, tensor


def loader_names(model: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that maps Hugging Face names to the loader's names. Joined tensors keep their names."""
    if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is None:
        return str
    mapper = replace(mapper, orig_to_new_stacked={})
    return lambda name: next(iter(mapper.apply_list([name])), name)


def _is_expected(layer: Any, key: tuple[int, str] | None, found: torch.Tensor) -> bool:
    checksum = tensor_checksum(found)
    return _sums.setdefault(layer, {}).setdefault(key, checksum) == checksum


def _is_readable(layer: Any) -> bool:
    return getattr(layer.quant_method, "unquantized_backend", None) in READABLE


def _projections(layer: Any) -> tuple[str, str, str]:
    return layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name


def _routed(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, RoutedExperts))


@lru_cache(maxsize=2)
def _places(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Return [out, in] int32: the position to which packing moves each element."""
    number = torch.arange(shape[0] * shape[1], dtype=torch.int32)
    carrier, mask = (torch.int32, -1) if dtype.itemsize == 4 else (torch.int16, 0xFFFF)
    packed = torch.zeros_like(number)
    for shift in range(0, 32, 8 * dtype.itemsize):  # an index is packed in as many pieces as it needs
        piece = (number >> shift).to(carrier).view(dtype).view(1, *shape)
        packed |= (cpu_prepack_moe_weight(piece, isa).view(carrier).flatten().int() & mask) << shift
    return torch.empty_like(number).index_copy_(0, packed.long(), number).view(shape)
