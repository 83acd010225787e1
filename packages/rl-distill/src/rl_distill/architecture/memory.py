"""Memory on each rank: of weights, gradients and optimizer, and an estimate of activations; without torch."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Literal, NamedTuple

from rl_core.weights import LORA_B
from rl_distill.architecture.lora_targets import adapter_shapes
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import (
    ROUTED,
    is_frozen,
    is_hidden_matrix,
    keeps_float32,
    output_name,
    tensor_shapes,
)
from rl_distill.options import Algorithm, LearnerOptions, LoraOptions, ParallelOptions

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
        optimizer: Bytes of the moments and, for bfloat16 weights, the float32 master weights; 0 for a frozen model.
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
    algorithm: Algorithm = "adam",
    lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
) -> list[RankMemory]:
    """Return the memory of a model on a rank of each pipeline stage.

    Ranks that share the optimizer pad their shards to equal lengths, so a rank may use slightly more. With
    `shard_weights`, the optimizer's float32 weights are the only ones; a step also gathers those of a layer or two, and
    those outside of layers.

    Args:
        config: The model's configuration.
        parallel: A parallel layout that divides the model evenly.
        dtype: Dtype of the parameters.
        kind: Role of the model; "frozen" keeps only the policy's weights.
        algorithm: Optimizer; Muon keeps one moment of a hidden matrix instead of two.
        lora: Adapter that trains instead of the policy's weights; a reference that shares these weights uses no memory.

    Raises:
        SettingsError: A target module matches no matrix that an adapter can change.
    """
    expert_size = parallel.expert * (parallel.expert_tensor or parallel.tensor)
    copies = {True: parallel.ranks // (expert_size * parallel.pipeline)}
    copies[False] = parallel.ranks // (parallel.tensor * parallel.pipeline)
    weight = MASTER_BYTES if parallel.shard_weights and kind != "frozen" else WEIGHT_BYTES[dtype]
    kept = MOMENTS_BYTES + (MASTER_BYTES if weight < MASTER_BYTES else 0)
    adapter, found = adapter_shapes(config, lora) if kind == "policy" else {}, []
    for stage in range(parallel.pipeline):
        sizes, of_frozen, of_muon = {True: 0, False: 0}, 0, 0
        for name, shape in _stage_shapes(config, parallel, stage, is_critic=kind == "critic"):
            if keeps_float32(name, config):
                of_frozen += MASTER_BYTES * math.prod(shape)
            elif is_frozen(name, config):
                of_frozen += weight * math.prod(shape)
            else:
                sizes[ROUTED in name] += (size := _rank_size(name, shape, parallel.tensor, expert_size))
                of_muon += size if algorithm == "muon" and is_hidden_matrix(name, shape) else 0
        if parallel.shard_weights:  # over all ranks
            sizes = {of: -(-size // parallel.ranks) for of, size in sizes.items()}
        of_weights = weight * sum(sizes.values()) + of_frozen
        if kind == "frozen":
            found.append(RankMemory(of_weights, 0, 0))
            continue
        if adapter:
            here = {name: shape for name, shape in adapter.items() if _is_here(name, config, parallel, stage)}
            trained = sum(_adapter_size(name, shape, parallel.tensor) for name, shape in here.items())
            sizes, of_weights = {True: 0, False: trained}, of_weights + weight * trained
        shares = [-(-size // (copies[of] if parallel.distributed_optimizer else 1)) for of, size in sizes.items()]
        optimizer = kept * sum(shares) - MOMENTS_BYTES // 2 * of_muon
        found.append(RankMemory(of_weights, GRADIENT_BYTES * sum(sizes.values()), optimizer))
    return found


def _stage_shapes(
    config: PolicyConfig, parallel: ParallelOptions, stage: int, *, is_critic: bool
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors of a pipeline stage; with a tied head, the last of several stages copies the embedding."""
    last = parallel.pipeline - 1
    shapes = tensor_shapes(config)
    if is_critic:
        shapes = {name: shape for name, shape in shapes.items() if name != output_name(config)}
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


_FLOAT32 = 4
_INT64 = 8
CHUNK_LOGITS = 2**28
"""Number of logits computed at once on a GPU: a few thousand tokens, enough for an efficient matrix product."""


def step_memory(config: PolicyConfig, parallel: ParallelOptions, options: LearnerOptions) -> list[int]:
    """Return the bytes that a step needs on a rank of each pipeline stage in addition to `rank_memory`.

    These are the `kept_activations`, and the working memory of either the head or a layer that is computed again. The
    head needs less if torch's compiler fuses passes over the logits.
    """
    found, tokens = kept_activations(config, parallel, options), options.micro_batch_tokens
    size, layer = WEIGHT_BYTES[options.dtype], 0.0
    if options.recompute == "full":
        again = replace(options, recompute="none")
        layer = max(_layer(config, parallel, again, index) for index in range(config.num_layers)) * tokens
    # The head keeps its inputs whole: the hidden states before and after the norm, those to score, and their gradient.
    head = 4 * config.hidden_size * size * tokens
    logits = min(CHUNK_LOGITS, tokens * config.vocab_size // parallel.tensor) * (size + 2 * _FLOAT32)
    working = [layer] * (len(found) - 1) + [max(layer, logits) + head]
    return [kept + int(more) for kept, more in zip(found, working, strict=True)]


def kept_activations(config: PolicyConfig, parallel: ParallelOptions, options: LearnerOptions) -> list[int]:
    """Return the bytes of activations that the layers keep on a rank of each pipeline stage, with full micro-batches.

    Sums what the autograd nodes of each layer save with the GPU kernels, for the largest number of micro-batches that a
    stage holds between forward and backward. Tokens are assumed to spread evenly over experts. Under selective
    recomputation, norms and dense feed-forward layers in `recompute_modules` are left out; other recomputed modules
    count in full. `step_memory` adds the working memory.

    Args:
        config: The policy's configuration.
        parallel: A parallel layout that divides the model evenly.
        options: Micro-batch tokens, dtype and recomputation.
    """
    found = []
    chunk = config.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
    for stage in range(parallel.pipeline):
        total = 0.0
        for virtual in range(parallel.virtual_pipeline):
            first = (virtual * parallel.pipeline + stage) * chunk
            total += sum(_layer(config, parallel, options, layer) for layer in range(first, first + chunk))
        num_chunks = _chunks_in_flight(parallel, stage)
        found.append(int(total * num_chunks / parallel.virtual_pipeline) * options.micro_batch_tokens)
    return found


def _chunks_in_flight(parallel: ParallelOptions, stage: int) -> int:
    """Return the most micro-batch chunks between forward and backward at once on a stage, in Megatron's schedules."""
    behind = parallel.pipeline - stage - 1
    if parallel.virtual_pipeline == 1:
        return behind + 1
    return 2 * behind + (parallel.virtual_pipeline - 1) * parallel.pipeline + 1


def _layer(config: PolicyConfig, parallel: ParallelOptions, options: LearnerOptions, layer: int) -> float:
    """Return the bytes that a layer keeps per token of the rank."""
    stream = config.hidden_size * WEIGHT_BYTES[options.dtype] / (parallel.tensor if parallel.sequence else 1)
    if options.recompute == "full":
        return stream
    again: Collection[str] = options.recompute_modules if options.recompute == "selective" else ()
    # Each norm keeps its input, and its output as the next projection's input.
    norms = 2 * (stream if "layernorm" in again else 2 * stream)
    if config.is_mixture(layer):
        return norms + _attention(config, parallel, options) + _mixture(config, parallel, options)
    dense = 0.0 if "mlp" in again else _gated(config.ffn_hidden_size, parallel, options)
    return norms + _attention(config, parallel, options) + dense


def _attention(config: PolicyConfig, parallel: ParallelOptions, options: LearnerOptions) -> float:
    queries, keys = config.num_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    joined, rotated, attended = queries + 2 * keys, queries + keys, queries
    heads = config.num_heads  # log-sum-exp of each head
    if config.has_qk_norm:
        joined += queries  # the norm reads a copy of the queries
        heads += config.num_heads + config.num_key_value_heads
    # Context-parallel ranks, which exchange tokens for heads, also keep the exchanged values.
    exchanged = keys if parallel.context > 1 else 0
    tables = 1.5 * (config.rotary_dim or config.head_dim)
    of_rank = (joined + rotated + attended + exchanged) / parallel.tensor
    return (of_rank + tables) * WEIGHT_BYTES[options.dtype] + heads * _FLOAT32 / parallel.tensor


def _gated(size: int, parallel: ParallelOptions, options: LearnerOptions) -> float:
    """Return the bytes per token of the gate, the up projection and their product."""
    return 3 * size * WEIGHT_BYTES[options.dtype] / parallel.tensor


def _mixture(config: PolicyConfig, parallel: ParallelOptions, options: LearnerOptions) -> float:
    mixture = config.mixture
    if mixture is None:
        return 0.0
    size, tensor = WEIGHT_BYTES[options.dtype], parallel.expert_tensor or parallel.tensor
    # For every expert: softmax, normalized softmax, probability and chosen flag. For the chosen ones: three indices.
    routing = mixture.num_experts * (2 * _FLOAT32 + 1 + size) + 3 * _INT64 * mixture.top_k
    rows = mixture.top_k * (config.hidden_size + 2 * mixture.ffn_hidden_size / tensor) * size
    tokens = parallel.tensor if parallel.sequence else 1
    # Tensor-parallel ranks of an expert each hold all of its rows.
    return routing / tokens + rows * tensor / tokens + _gated(mixture.shared_ffn_hidden_size or 0, parallel, options)
