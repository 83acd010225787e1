"""The weights that vLLM's live layers serve, probed on each rank and joined.

vLLM's CPU layers pack their weights and drop the originals, GPU layers fuse them, and tensor parallelism gives each
rank a part. The weights are therefore probed instead of read: each live layer is applied to the probe vector, and its
output is split where the Hugging Face tensors were joined. Each rank reports which rows of a tensor's probe it serves.
A layer that is split along its input returns a summand of all rows. Rows that several ranks serve (norms, replicated
key and value heads) must be right on each of them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rl_core.data import FloatArray
from rl_core.weights import probe_tensor, probe_vector
from rl_rollout.engines.vllm.mixtures import ExpertPart, bias_parts, served_experts

LiveParts = dict[str, "list[LivePart]"]
"""One rank's live part of each tensor, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePart:
    """One rank's live part of a tensor's probe.

    Attributes:
        values: [n] float32.
        start: Row of the whole probe that the first value belongs to.
        num_rows: Number of rows of the whole probe.
        is_summand: Whether the values of all ranks add up. Otherwise, they are concatenated.
    """

    values: FloatArray
    start: int
    num_rows: int
    is_summand: bool = False


def live_parts(model: torch.nn.Module, wanted: Collection[str] = ()) -> LiveParts:
    """Return the live parts of this rank's layers, by checkpoint name as the model's loader knows it.

    Args:
        model: vLLM's model.
        wanted: Names of the checkpoint. A layer with one of these names is not split into its joined tensors, and a
            buffer with one of them is a weight.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    parts: LiveParts = {}
    for name, part in _named_parts(model, packed, wanted):
        parts.setdefault(name, []).append(part)
    for name, buffer in model.named_buffers():
        if name in wanted and name not in parts:
            parts[name] = [_whole(buffer)]
    return parts


def join_parts(ranks: Sequence[LiveParts], expected: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Join the ranks' parts into each tensor's probe.

    Args:
        ranks: Each rank's parts; all ranks have the same names.
        expected: The probes that were sent. For rows that several ranks serve, the value farthest from these counts,
            because a single stale copy makes rollouts wrong.

    Returns:
        [out] by name; NaN for rows that no rank serves.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {
        name: _joined([part for rank in ranks for part in rank.get(name, ())], expected.get(name)) for name in names
    }


def join_arrived(ranks: Sequence[Mapping[str, str]], sent: Mapping[str, str]) -> dict[str, str]:
    """Return checksums of the tensors as they arrived. If ranks differ, return one that differs from the sent one."""
    return {
        name: next((rank[name] for rank in ranks if rank[name] != sent.get(name)), first)
        for name, first in ranks[0].items()
    }


def _joined(parts: Sequence[LivePart], expected: FloatArray | None) -> FloatArray:
    num_rows = parts[0].num_rows
    if len(parts) == 1 and len(parts[0].values) == num_rows:
        return parts[0].values
    if parts[0].is_summand:
        total = np.zeros(num_rows, np.float32)
        for part in parts:
            total[part.start : part.start + len(part.values)] += part.values
        return total
    whole, worst = np.full(num_rows, np.nan, np.float32), np.full(num_rows, -1.0)
    if expected is None or expected.shape != whole.shape:
        expected = np.zeros(num_rows, np.float32)
    for part in parts:
        rows = slice(part.start, part.start + len(part.values))
        distance = np.nan_to_num(np.abs(part.values - expected[rows]), nan=np.inf)
        whole[rows] = np.where(distance > worst[rows], part.values, whole[rows])
        worst[rows] = np.maximum(distance, worst[rows])
    return whole


def _named_parts(
    model: torch.nn.Module, packed: Mapping[str, list[str]], wanted: Collection[str]
) -> Iterator[tuple[str, LivePart]]:
    for path, module in model.named_modules():
        path = path.removesuffix(".base_layer")  # a layer with adapter support is wrapped
        if isinstance(module, LinearBase) and module.weight.ndim < 3:  # else it has the kernel of a convolution
            yield from _linear_parts(path, module, {} if f"{path}.weight" in wanted else packed)
        elif isinstance(module, VocabParallelEmbedding):
            yield f"{path}.weight", _vocabulary_part(module)
            if getattr(module, "bias", None) is not None:
                yield f"{path}.bias", _vocabulary_rows(module, probe_tensor(module.bias))
        elif isinstance(module, RoutedExperts):
            yield from ((name, _expert_part(part, values)) for name, part, values in served_experts(path, module))
        elif isinstance(module, MoERunner):
            for name, bias in bias_parts(path, module):
                part = _whole(bias.read())
                if not bias.is_expected(bias.read()):
                    part.values.fill(np.nan)
                yield name, part
        else:
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                yield name, _whole(parameter)


def _whole(tensor: torch.Tensor) -> LivePart:
    """Return the part of a tensor that every rank has."""
    probe = probe_tensor(tensor)
    return LivePart(values=probe, start=0, num_rows=len(probe))


def _linear_parts(path: str, module: LinearBase, packed: Mapping[str, list[str]]) -> Iterator[tuple[str, LivePart]]:
    own_name = path.rpartition(".")[2]
    parent = path.removesuffix(own_name)
    names = packed.get(own_name, [own_name])
    yield from _split(module, _apply(module, *input_range(module)), [f"{parent}{name}.weight" for name in names])
    if module.bias is not None:
        bias = module.bias.detach().float().cpu()
        yield from _split(module, bias, [f"{parent}{name}.bias" for name in names], is_summand=False)


def input_range(module: LinearBase) -> tuple[int, int, int]:
    """Return this rank's first and last input, and the total over all ranks."""
    if not isinstance(module, RowParallelLinear):
        return 0, module.input_size, module.input_size
    size = module.input_size_per_partition
    return module.tp_rank * size, (module.tp_rank + 1) * size, module.input_size


def _split(
    module: LinearBase, outputs: torch.Tensor, names: Sequence[str], *, is_summand: bool | None = None
) -> Iterator[tuple[str, LivePart]]:
    """Locate this rank's outputs. Joined layers are concatenated on each rank and in a joined tensor."""
    if isinstance(module, RowParallelLinear):
        sums = module.tp_size > 1 if is_summand is None else is_summand
        yield names[0], LivePart(values=outputs.numpy(), start=0, num_rows=len(outputs), is_summand=sums)
        return
    sizes: list[int] = list(module.output_partition_sizes)
    wholes = [size * num_parts(module, index) for index, size in enumerate(sizes)]
    before = [0] * len(sizes) if len(names) > 1 else [sum(wholes[:index]) for index in range(len(sizes))]
    for index, part in enumerate(torch.split(outputs, sizes)):
        yield (
            names[index] if len(names) > 1 else names[0],
            LivePart(
                values=part.numpy(),
                start=before[index] + part_index(module, index) * sizes[index],
                num_rows=wholes[index] if len(names) > 1 else sum(wholes),
            ),
        )


def num_parts(module: LinearBase, index: int) -> int:
    """Return how many parts the layer's joined tensor `index` (such as q, k, v) is split into."""
    if isinstance(module, ReplicatedLinear):
        return 1
    return int(module.tp_size // num_copies(module, index))


def part_index(module: LinearBase, index: int) -> int:
    """Return the index of this rank's part."""
    part: int = 0 if isinstance(module, ReplicatedLinear) else module.tp_rank // num_copies(module, index)
    return part


def num_copies(module: LinearBase, index: int) -> int:
    """Return how many ranks serve the same key and value head, if there are more ranks than heads."""
    return module.num_kv_head_replicas if isinstance(module, QKVParallelLinear) and index > 0 else 1


def _vocabulary_part(module: VocabParallelEmbedding) -> LivePart:
    if isinstance(module, ParallelLMHead):
        return _vocabulary_rows(module, _apply(module, 0, module.embedding_dim, module.embedding_dim).numpy())
    return _vocabulary_rows(module, probe_tensor(module.weight))


def _vocabulary_rows(module: VocabParallelEmbedding, values: FloatArray) -> LivePart:
    """Return this rank's rows, without padding."""
    indices = module.shard_indices
    rows = values[: indices.num_org_elements]
    return LivePart(values=rows, start=indices.org_vocab_start_index, num_rows=module.org_vocab_size)


def _expert_part(part: ExpertPart, values: FloatArray) -> LivePart:
    """Return this rank's part of an expert's tensor; NaN unless it serves what arrived."""
    config = part.layer.moe_config
    if part.dim:
        return LivePart(values=values, start=0, num_rows=len(values), is_summand=config.tp_size > 1)
    return LivePart(values=values, start=config.tp_rank * len(values), num_rows=len(values) * config.tp_size)


def _apply(module: Any, first: int, last: int, num_inputs: int) -> torch.Tensor:
    """Return [out] float32: the live, packed layer applied to its part of the probe vector."""
    vector = probe_vector(num_inputs)[first:last].to(device=module.weight.device, dtype=module.weight.dtype)
    output: torch.Tensor = module.quant_method.apply(module, vector.unsqueeze(0))
    return output.squeeze(0).float().cpu()
