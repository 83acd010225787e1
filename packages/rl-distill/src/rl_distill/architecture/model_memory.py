"""Compute the memory of a model's weights, gradients and optimizer on each rank; without torch."""

import math
from typing import Literal, NamedTuple

from rl_core.weights import LORA_B
from rl_distill.architecture.lora_targets import adapter_shapes
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import ROUTED, is_trained, tensor_shapes
from rl_distill.options import LoraOptions, ParallelOptions

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4
MOMENTS_BYTES = 8
MASTER_BYTES = 4
"""Bytes per element of the float32 master weights behind bfloat16 weights."""


EMBEDDING = "model.embed_tokens.weight"


class RankMemory(NamedTuple):
    """Bytes of a model's persistent tensors on one rank, without activations.

    Attributes:
        weights: Bytes of the parameters.
        gradients: Bytes of the float32 gradients; 0 for a frozen model.
        optimizer: Bytes of Adam's moments and, for bfloat16 weights, the float32 master weights; 0 for a frozen model.
    """

    weights: int
    gradients: int
    optimizer: int


def rank_memory(
    config: PolicyConfig,
    parallel: ParallelOptions,
    *,
    dtype: str,
    kind: Literal["policy", "critic", "frozen"] = "policy",
    lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
) -> list[RankMemory]:
    """Return the memory of a model on a rank of each pipeline stage.

    Ranks that share the optimizer pad their shards to equal lengths, so a rank may use slightly more.

    Args:
        config: The model's configuration.
        parallel: A parallel layout that divides the model evenly.
        dtype: Dtype of the parameters.
        kind: Role of the model; "frozen" keeps only the policy's weights.
        lora: Adapter that trains instead of the policy's weights; a reference that shares these weights uses no memory.

    Raises:
        SettingsError: A target module matches no matrix that an adapter can change.
    """
    expert_size = parallel.expert * (parallel.expert_tensor or parallel.tensor)
    copies = {True: parallel.ranks // (expert_size * parallel.pipeline)}
    copies[False] = parallel.ranks // (parallel.tensor * parallel.pipeline)
    weight = WEIGHT_BYTES[dtype]
    kept = MOMENTS_BYTES + (MASTER_BYTES if weight < MASTER_BYTES else 0)
    adapter, found = adapter_shapes(config, lora) if kind == "policy" else {}, []
    for stage in range(parallel.pipeline):
        sizes, of_biases = {True: 0, False: 0}, 0
        for name, shape in _stage_shapes(config, parallel, stage, is_critic=kind == "critic"):
            if is_trained(name):
                sizes[ROUTED in name] += _rank_size(name, shape, parallel.tensor, expert_size)
            else:
                of_biases += MASTER_BYTES * math.prod(shape)
        of_weights = weight * sum(sizes.values()) + of_biases
        if kind == "frozen":
            found.append(RankMemory(of_weights, 0, 0))
            continue
        if adapter:
            here = {name: shape for name, shape in adapter.items() if _is_here(name, config, parallel, stage)}
            trained = sum(_adapter_size(name, shape, parallel.tensor) for name, shape in here.items())
            sizes, of_weights = {True: 0, False: trained}, of_weights + weight * trained
        shares = [-(-size // (copies[of] if parallel.distributed_optimizer else 1)) for of, size in sizes.items()]
        found.append(RankMemory(of_weights, GRADIENT_BYTES * sum(sizes.values()), kept * sum(shares)))
    return found


def _stage_shapes(
    config: PolicyConfig, parallel: ParallelOptions, stage: int, *, is_critic: bool
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors of a pipeline stage; with a tied head, the last of several stages copies the embedding."""
    last = parallel.pipeline - 1
    shapes = tensor_shapes(config)
    if is_critic:
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
        shapes |= {"score.weight": (1, config.hidden_size), "score.bias": (1,)}
    here = [(name, shape) for name, shape in shapes.items() if _is_here(name, config, parallel, stage)]
    has_copy = config.is_tied and not is_critic and stage == last > 0
    return [*here, *([(EMBEDDING, shapes[EMBEDDING])] if has_copy else [])]


def _is_here(name: str, config: PolicyConfig, parallel: ParallelOptions, stage: int) -> bool:
    """Return whether a tensor is on a pipeline stage."""
    if name.startswith("model.layers."):
        chunk_layers = config.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
        return int(name.split(".")[2]) // chunk_layers % parallel.pipeline == stage
    return stage == (0 if name == EMBEDDING else parallel.pipeline - 1)


def _adapter_size(name: str, shape: tuple[int, ...], tensor: int) -> int:
    """Return the elements of an A or B matrix on a rank: all of it, or its tensor-parallel shard."""
    is_cut_by_columns = ".o_proj." in name or ".down_proj." in name
    is_whole = is_cut_by_columns == name.endswith(LORA_B)
    return math.prod(shape) // (1 if is_whole else tensor)


def _rank_size(name: str, shape: tuple[int, ...], tensor: int, expert_size: int) -> int:
    """Return the elements of a tensor on a rank; norms, routers and a critic's head are replicated."""
    if ROUTED in name:
        return math.prod(shape) // expert_size
    if "norm." in name or ".mlp.gate." in name or name.startswith("score."):
        return math.prod(shape)
    is_vocabulary = not name.startswith("model.layers.")
    rows = -(-shape[0] // tensor) * tensor if is_vocabulary else shape[0]
    return rows * math.prod(shape[1:]) // tensor
