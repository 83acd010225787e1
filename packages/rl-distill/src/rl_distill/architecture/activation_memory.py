"""Estimate the activation memory that a training step keeps on a GPU between forward and backward; without torch."""

from collections.abc import Collection

from rl_distill.architecture.model_memory import WEIGHT_BYTES
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.options import LearnerOptions, ParallelOptions

_FLOAT32 = 4
_INT64 = 8


def kept_activations(config: PolicyConfig, parallel: ParallelOptions, options: LearnerOptions) -> list[int]:
    """Return the bytes of activations that the layers keep on a rank of each pipeline stage, with full micro-batches.

    Sums what the autograd nodes of each layer save with the GPU kernels, for the largest number of micro-batches that a
    stage holds between forward and backward. Tokens are assumed to spread evenly over experts. Under selective
    recomputation, norms and dense feed-forward layers in `recompute_modules` are left out; other recomputed modules
    count in full. The working memory of the head and of one layer's backward pass is not included because it depends on
    what torch's compiler fuses.

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
