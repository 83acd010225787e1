"""LoRA beside megatron's matrices: one A and one B for each Hugging Face matrix in them (Hu et al. 2021).

megatron's matrix is frozen and computes what it did; the low-rank products are added to its output. Column-parallel
matrices (queries, keys and values; gate and up) have A whole on every tensor rank and B cut by rows, row-parallel ones
(output; down) A cut by columns and B whole.
"""

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
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
"""In the names of an adapter's parameters, and of no others."""


def with_adapter(kind: type, names: Collection[str], options: LoraOptions) -> type | ModuleSpec:
    """How to build one of megatron's layers.

    Args:
        kind: ColumnParallelLinear or RowParallelLinear.
        names: Last parts of the names of the matrices in it that have an adapter, such as "q_proj".
        options: The adapter's.
    """
    if not names:
        return kind
    adapted = LoraColumn if issubclass(kind, ColumnParallelLinear) else LoraRow
    return ModuleSpec(module=adapted, params={"names": frozenset(names), "lora": options})


@contextlib.contextmanager
def base_alone(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside the context, the chunks compute without their adapter."""
    layers = [layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, LoraColumn | LoraRow)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


@contextlib.contextmanager
def drawing_by(key: tuple[int, ...]) -> Iterator[None]:
    """Inside the context, what adapters leave out follows from a key; random numbers of others stay as they were."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    with undisturbed_random_numbers():
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


class LoraColumn(ColumnParallelLinear):  # type: ignore[misc]
    """Column-parallel layer of several joined matrices, with an adapter for each of some of them.

    Attributes:
        lora_A: [rank, in] by the matrix's name.
        lora_B: [out / ranks, rank] likewise.
        is_on: False computes without the adapter.
    """

    def __init__(
        self, *args: Any, names: Collection[str], lora: LoraOptions, tp_comm_buffer_name: str, **kwargs: Any
    ) -> None:
        """Make the layer, and room for A and B.

        Args:
            *args: megatron's.
            names: Of the matrices that have an adapter.
            lora: Its options.
            tp_comm_buffer_name: megatron's; says which layer it is.
            **kwargs: megatron's.
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
        """As megatron's, with what the adapter adds."""
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
        return _Added.apply(output, low, self._joined_b(), self._lora.scaling), bias  # type: ignore[no-untyped-call]

    def _parts_of(self, buffer_name: str) -> dict[str, tuple[int, int, int]]:
        """(groups, heads of a group, rows of a head) of each matrix, in the order of the rows of a group."""
        if buffer_name == "qkv":
            groups, size = self.config.num_query_groups // self.tp_group.size(), self.config.kv_channels
            heads = {
                "q_proj": self.config.num_attention_heads // self.config.num_query_groups,
                "k_proj": 1,
                "v_proj": 1,
            }
            return {name: (groups, of_group, size) for name, of_group in heads.items()}
        return dict.fromkeys(("gate_proj", "up_proj"), (1, 1, self.output_size_per_partition // 2))

    def _joined_b(self) -> Tensor:
        """[out / ranks, rank * adapted matrices]: each B in the rows of its matrix and in columns of its own."""
        rank, size = self._lora.rank, self._lora.rank * len(self._names)
        blocks, start = [], 0
        for name, (shape, is_adapted) in self._parts.items():
            if is_adapted:
                own = self.lora_B[name].view(*shape, rank)
                blocks.append(F.pad(own, (start, size - start - rank)))
                start += rank
            else:
                blocks.append(self.weight.new_zeros(*shape, size))
        return torch.cat(blocks, 1).flatten(0, 2)


class LoraRow(RowParallelLinear):  # type: ignore[misc]
    """Row-parallel layer with an adapter; the low-rank product is summed over ranks, not the whole output again.

    Attributes:
        lora_A: [rank, in / ranks] by the matrix's name.
        lora_B: [out, rank] likewise.
        is_on: False computes without the adapter.
    """

    def __init__(self, *args: Any, names: Collection[str], lora: LoraOptions, **kwargs: Any) -> None:
        """As `LoraColumn`; of one matrix."""
        super().__init__(*args, **kwargs)
        self.is_on, self._lora = True, lora
        (self._name,) = names
        inputs, outputs = (lora.rank, self.input_size_per_partition), (self.output_size, lora.rank)
        self.lora_A = ParameterDict({self._name: _parameter(self, inputs, axis=1)})
        self.lora_B = ParameterDict({self._name: _parameter(self, outputs, axis=None)})

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As megatron's, with what the adapter adds."""
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
        # Not in place: megatron's sum over ranks gives a view.
        return torch.addmm(output.flatten(0, -2), low.flatten(0, -2), b, alpha=self._lora.scaling).view_as(output), bias


class _Added(torch.autograd.Function):
    """output + scaling * low @ b.t(), in the place of output: [T, 1, out], [T, 1, rank] and [out, rank].

    Nothing keeps the frozen matrix's output, which is the largest tensor of a layer.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, low: Tensor, b: Tensor, scaling: float) -> Tensor:
        output.flatten(0, -2).addmm_(low.flatten(0, -2), b.t(), alpha=scaling)
        ctx.mark_dirty(output)
        ctx.save_for_backward(low, b)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        low, b = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        of_low = (grad @ b).mul_(ctx.scaling).view_as(low)
        return grads[0], of_low, (grad.t() @ low.flatten(0, -2)).mul_(ctx.scaling), None


def _parameter(layer: Any, shape: tuple[int, int], *, axis: int | None) -> Parameter:
    """An empty A or B with megatron's attributes: how ranks sum its gradient, and which of them the norm counts.

    Args:
        layer: Which has it.
        shape: On this rank.
        axis: By which tensor ranks cut it; None where each has it whole.
    """
    parameter: Any = Parameter(torch.empty(shape, dtype=layer.config.params_dtype))
    if axis is not None:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
    else:
        parameter.sequence_parallel = layer.sequence_parallel  # each rank sees a part of the tokens
    parameter.allreduce = True
    return parameter  # type: ignore[no-any-return]


def _dropped(x: Tensor, layer: Any, *, is_part: bool) -> Tensor:
    """The input of an adapter in training, some of it left out.

    Args:
        x: [T, 1, in].
        layer: The adapter's.
        is_part: Each tensor rank has another part of the input, and draws for itself; else all draw the same.
    """
    share = layer._lora.dropout
    if not (share and layer.training):
        return x
    # A layer that is computed again finds the CPU's generator as it was.
    seed = int(torch.randint(2**40, ())) + (layer.tp_group.rank() if is_part else 0)
    generator = torch.Generator(x.device).manual_seed(seed)
    return x * torch.empty_like(x).bernoulli_(1.0 - share, generator=generator).div_(1.0 - share)
