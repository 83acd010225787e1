"""What a model takes on its learner's ranks, from config.json and the layout alone; without torch."""

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
"""Of the float32 weights behind bfloat16 ones."""


EMBEDDING = "model.embed_tokens.weight"


class RankMemory(NamedTuple):
    """Bytes that a model keeps on one rank, without activations.

    Attributes:
        weights: Of the parameters.
        gradients: In float32; 0 of a frozen model.
        optimizer: Adam's moments, and float32 weights behind bfloat16 ones; 0 of a frozen model.
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
    """What each rank of a pipeline stage keeps of a model, stage by stage.

    Where ranks share the optimizer, their stretches are padded to equal lengths: a rank may have a little more.

    Args:
        config: Of the model.
        parallel: The layout, which divides it.
        dtype: Of the parameters.
        kind: What it is; "frozen" has a policy's weights alone.
        lora: The adapter that trains in the place of a policy's weights; a reference that shares these takes nothing.

    Raises:
        SettingsError: A target module of the adapter is none.
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
    """The tensors of a pipeline stage; the last of several has a copy of the embedding that is its head."""
    last = parallel.pipeline - 1
    shapes = tensor_shapes(config)
    if is_critic:
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
        shapes |= {"score.weight": (1, config.hidden_size), "score.bias": (1,)}
    here = [(name, shape) for name, shape in shapes.items() if _is_here(name, config, parallel, stage)]
    has_copy = config.is_tied and not is_critic and stage == last > 0
    return [*here, *([(EMBEDDING, shapes[EMBEDDING])] if has_copy else [])]


def _is_here(name: str, config: PolicyConfig, parallel: ParallelOptions, stage: int) -> bool:
    """Whether a tensor is on a pipeline stage."""
    if name.startswith("model.layers."):
        chunk_layers = config.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
        return int(name.split(".")[2]) // chunk_layers % parallel.pipeline == stage
    return stage == (0 if name == EMBEDDING else parallel.pipeline - 1)


def _adapter_size(name: str, shape: tuple[int, ...], tensor: int) -> int:
    """Elements of an A or B on a rank: whole, or cut as its matrix is."""
    is_cut_by_columns = ".o_proj." in name or ".down_proj." in name
    is_whole = is_cut_by_columns == name.endswith(LORA_B)
    return math.prod(shape) // (1 if is_whole else tensor)


def _rank_size(name: str, shape: tuple[int, ...], tensor: int, expert_size: int) -> int:
    """Elements of a tensor on a rank; norms, routers and a critic's head are complete on each."""
    if ROUTED in name:
        return math.prod(shape) // expert_size
    if "norm." in name or ".mlp.gate." in name or name.startswith("score."):
        return math.prod(shape)
    is_vocabulary = not name.startswith("model.layers.")
    rows = -(-shape[0] // tensor) * tensor if is_vocabulary else shape[0]
    return rows * math.prod(shape[1:]) // tensor
