"""LoRA on Megatron's matrices: one A and one B per Hugging Face matrix in them (Hu et al. 2021).

Megatron's matrix is frozen, and the low-rank products are added to its output. For column-parallel matrices (queries,
keys and values; gate and up), A is replicated on every tensor rank and B is split by rows. For row-parallel matrices
(output; down), A is split by columns and B is replicated.
"""

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Parameter, ParameterDict

from rl_distill.megatron.parallel import undisturbed_random_numbers
from rl_distill.options import LoraOptions

PARAMETER = ".lora_"
"""Substring of the names of an adapter's parameters."""


def with_adapter(kind: type, names: Collection[str], options: LoraOptions) -> type | ModuleSpec:
    """Return the specification of a linear layer, with an adapter if any of its matrices has one.

    Args:
        kind: ColumnParallelLinear or RowParallelLinear.
        names: Last name part of the adapted matrices in the layer, such as "q_proj".
        options: Options of the adapter.
    """
    if not names:
        return kind
    adapted = LoraColumn if issubclass(kind, ColumnParallelLinear) else LoraRow
    return ModuleSpec(module=adapted, params={"names": frozenset(names), "lora": options})


@contextlib.contextmanager
def base_alone(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Disable the chunks' adapters inside the context."""
    layers = _adapted_layers(chunks)
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def set_options(chunks: Sequence[torch.nn.Module], options: LoraOptions) -> None:
    """Let the chunks' adapters have other options of the same rank."""
    for layer in _adapted_layers(chunks):
        layer._lora = options


def _adapted_layers(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    kinds = LoraColumn | LoraRow | LoraLinear
    return [layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, kinds)]


@contextlib.contextmanager
def drawing_by(key: tuple[int, ...]) -> Iterator[None]:
    """Seed adapter dropout with a key inside the context; restore the generators on exit."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    with undisturbed_random_numbers():
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


class LoraColumn(ColumnParallelLinear):  # type: ignore[misc]
    """Column-parallel layer of several fused matrices, some of them with an adapter.

    Attributes:
        lora_A: [rank, in] by matrix name.
        lora_B: [out / ranks, rank] by matrix name.
        is_on: False to compute without the adapter.
    """

    def __init__(
        self, *args: Any, names: Collection[str], lora: LoraOptions, tp_comm_buffer_name: str, **kwargs: Any
    ) -> None:
        """Build the layer with A and B uninitialized.

        Args:
            *args: Positional arguments of Megatron's layer.
            names: Names of the adapted matrices.
            lora: Options of the adapter.
            tp_comm_buffer_name: Megatron's argument that identifies the layer.
            **kwargs: Other arguments of Megatron's layer.
        """
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.is_on, self._lora = True, lora
        parts = self._parts_of(tp_comm_buffer_name)
        self._parts = {name: (part, name in names) for name, part in parts.items()}
        self._names = [name for name in parts if name in names]  # a ParameterDict sorts
        inputs, rows = (lora.rank, self.input_size), {name: a * b * c for name, (a, b, c) in parts.items()}
        self.lora_A = ParameterDict({name: _parameter(self, inputs, axis=None) for name in self._names})
        self.lora_B = ParameterDict({name: _parameter(self, (rows[name], lora.rank), axis=0) for name in self._names})

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's layer and add the adapter's output."""
        output, bias = super().forward(input_, *args, **kwargs)
        if not self.is_on:
            return output, bias
        joined = torch.cat([self.lora_A[name] for name in self._names])
        low = F.linear(_dropped(input_, self, is_part=self.sequence_parallel), joined)
        if self.tp_group.size() > 1:
            if self.sequence_parallel:
                low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.tp_group)
            else:
                low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        starts, parts = self._placed_b()
        return _Added.apply(output, low, self._lora.scaling, starts, *parts), bias  # type: ignore[no-untyped-call]

    def _parts_of(self, buffer_name: str) -> dict[str, tuple[int, int, int]]:
        """Return (groups, heads per group, rows per head) of each matrix, in the order of the rows within a group."""
        if buffer_name == "qkv":
            groups, size = self.config.num_query_groups // self.tp_group.size(), self.config.kv_channels
            heads = {
                "q_proj": self.config.num_attention_heads // self.config.num_query_groups,
                "k_proj": 1,
                "v_proj": 1,
            }
            return {name: (groups, of_group, size) for name, of_group in heads.items()}
        return dict.fromkeys(("gate_proj", "up_proj"), (1, 1, self.output_size_per_partition // 2))

    def _placed_b(self) -> tuple[list[int], list[Tensor]]:
        """Return the first output column of each B, and the B matrices.

        Matrices whose rows are interleaved by group share a single B, in which each matrix has its own rows and
        its own columns of A's output.
        """
        rank, size = self._lora.rank, self._lora.rank * len(self._names)
        blocks: list[Tensor] = []
        starts: list[int] = []
        num_rows = left = 0
        for name, ((groups, heads, rows), is_adapted) in self._parts.items():
            shape = groups, heads, rows
            if is_adapted and groups == 1:
                starts.append(num_rows)
                blocks.append(self.lora_B[name])
            elif is_adapted:
                blocks.append(F.pad(self.lora_B[name].view(*shape, rank), (left, size - left - rank)))
                left += rank
            elif groups > 1:
                blocks.append(self.weight.new_zeros(*shape, size))
            num_rows += heads * rows
        return (starts, blocks) if starts else ([0], [torch.cat(blocks, 1).flatten(0, 2)])


class LoraRow(RowParallelLinear):  # type: ignore[misc]
    """Row-parallel layer with an adapter. Only the low-rank product is summed over ranks, not the whole output again.

    Attributes:
        lora_A: [rank, in / ranks] by matrix name.
        lora_B: [out, rank] by matrix name.
        is_on: False to compute without the adapter.
    """

    def __init__(self, *args: Any, names: Collection[str], lora: LoraOptions, **kwargs: Any) -> None:
        """Build the layer of one matrix; see `LoraColumn`."""
        super().__init__(*args, **kwargs)
        self.is_on, self._lora = True, lora
        (self._name,) = names
        inputs, outputs = (lora.rank, self.input_size_per_partition), (self.output_size, lora.rank)
        self.lora_A = ParameterDict({self._name: _parameter(self, inputs, axis=1)})
        self.lora_B = ParameterDict({self._name: _parameter(self, outputs, axis=None)})

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's layer and add the adapter's output."""
        output, bias = super().forward(input_)
        if not self.is_on:
            return output, bias
        low = F.linear(_dropped(input_, self, is_part=True), self.lora_A[self._name])
        if self.tp_group.size() > 1:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            low = reduce(low, group=self.tp_group)
        b = self.lora_B[self._name].t()
        # Not in place, because Megatron's sum over ranks returns a view.
        return torch.addmm(output.flatten(0, -2), low.flatten(0, -2), b, alpha=self._lora.scaling).view_as(output), bias


class LoraLinear(torch.nn.Module):
    """A linear module of transformers' model with an adapter.

    Attributes:
        in_features: Size of the input.
        out_features: Size of the output.
        weight: [out, in], frozen.
        bias: [out] or None, frozen.
        lora_A: [rank, in].
        lora_B: [out, rank].
        is_on: False to compute without the adapter.
    """

    sequence_parallel = False

    def __init__(self, base: torch.nn.Linear, lora: LoraOptions, *, config: Any) -> None:
        """Take over a module's matrix; A and B are uninitialized.

        Args:
            base: The module.
            lora: Options of the adapter.
            config: Megatron's configuration of the policy.
        """
        super().__init__()
        self.config, self.is_on, self._lora = config, True, lora
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = _parameter(self, (lora.rank, base.in_features), axis=None)
        self.lora_B = _parameter(self, (base.out_features, lora.rank), axis=None)

    def forward(self, input_: Tensor) -> Tensor:
        """Return the matrix's output plus the adapter's, [..., out]."""
        output = F.linear(input_, self.weight, self.bias)
        if not self.is_on:
            return output
        low = F.linear(_dropped(input_, self, is_part=False), self.lora_A)
        return output + F.linear(low, self.lora_B) * self._lora.scaling


class _Added(torch.autograd.Function):
    """output + scaling * low @ b.t(), added in place by parts: [T, 1, out], [T, 1, ranks], [rows, rank] each.

    Autograd does not save the frozen matrix's output, the largest tensor of a layer.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, low: Tensor, scaling: float, starts: Sequence[int], *parts: Tensor) -> Tensor:
        for start, b, of_low in _by_part(starts, parts, low):
            output.flatten(0, -2).narrow(1, start, len(b)).addmm_(of_low, b.t(), alpha=scaling)
        ctx.mark_dirty(output)
        ctx.save_for_backward(low, *parts)
        ctx.scaling, ctx.starts = scaling, starts
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        low, *parts = ctx.saved_tensors
        grad, of_lows, of_parts = grads[0].flatten(0, -2), [], []
        for start, b, of_low in _by_part(ctx.starts, parts, low):
            own = grad.narrow(1, start, len(b))
            of_lows.append(own @ b)
            of_parts.append((of_low.t() @ own).t().mul_(ctx.scaling))
        of_low = torch.cat(of_lows, 1).mul_(ctx.scaling).view_as(low)
        return grads[0], of_low, None, None, *of_parts


def _by_part(starts: Sequence[int], parts: Sequence[Tensor], low: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each part's first output column, its B, and its columns of A's output."""
    of_lows = torch.split(low.flatten(0, -2), [b.shape[1] for b in parts], 1)
    yield from zip(starts, parts, of_lows, strict=True)


def _parameter(layer: Any, shape: tuple[int, int], *, axis: int | None) -> Parameter:
    """Create an uninitialized A or B with the attributes by which Megatron sums gradients and computes norms.

    Args:
        layer: Layer of the parameter.
        shape: Shape on this rank.
        axis: Axis along which tensor ranks split it; None if it is replicated.
    """
    parameter: Any = Parameter(torch.empty(shape, dtype=layer.config.params_dtype))
    if axis is not None:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
    else:
        parameter.sequence_parallel = layer.sequence_parallel  # each rank processes part of the tokens
    parameter.allreduce = True
    return parameter  # type: ignore[no-any-return]


def _dropped(x: Tensor, layer: Any, *, is_part: bool) -> Tensor:
    """Apply the adapter's dropout to its input in training.

    Args:
        x: [T, 1, in].
        layer: Layer of the adapter.
        is_part: True if each tensor rank has a different part of the input and needs its own random mask; otherwise all
            use the same one.
    """
    share = layer._lora.dropout
    if not (share and layer.training):
        return x
    # Recomputed layers restore the CPU generator, and so draw the same mask.
    seed = int(torch.randint(2**40, ())) + (layer.tp_group.rank() if is_part else 0)
    generator = torch.Generator(x.device).manual_seed(seed)
    return x * torch.empty_like(x).bernoulli_(1.0 - share, generator=generator).div_(1.0 - share)
