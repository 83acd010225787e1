"""Parameters of known models, and memory per rank; `test_megatron_parallel` compares with real ranks."""

from dataclasses import replace

import pytest

from rl_distill.architecture.memory import kept_activations, rank_memory
from rl_distill.architecture.mixture_config import MixtureConfig
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import count_parameters
from rl_distill.options import LearnerOptions, ParallelOptions

DENSE = PolicyConfig(
    architecture="Qwen3MoeForCausalLM",
    num_layers=48,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151_936,
    max_position_embeddings=40_960,
    norm_eps=1e-6,
    rope_base=1e6,
    is_tied=False,
    initializer_range=0.02,
)
EXPERTS = MixtureConfig(num_experts=128, top_k=8, norm_topk_prob=True, ffn_hidden_size=768, layers=tuple(range(48)))
QWEN3_30B_A3B = replace(DENSE, mixture=EXPERTS)
TOTAL, ROUTED = 30_532_122_624, 48 * 128 * 3 * 2048 * 768
"""30.5B in total, according to its model card."""


def test_total_and_active_parameters() -> None:
    counts = count_parameters(QWEN3_30B_A3B)
    assert counts.total == TOTAL
    assert counts.active == TOTAL - ROUTED * 120 // 128 == 3_353_032_704  # 3.3B on the model card
    in_layers = counts.active - 2 * 151_936 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert counts.multiplied == in_layers - norms
    dense = count_parameters(DENSE)
    assert dense.total == dense.active


def test_experts_and_the_rest_are_shared_over_other_ranks() -> None:
    layout = ParallelOptions(ranks=8, tensor=2, sequence=True, expert=4, expert_tensor=1, distributed_optimizer=True)
    (found,) = rank_memory(QWEN3_30B_A3B, layout, dtype="bfloat16")
    whole = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048  # norms and routers
    rest = (TOTAL - ROUTED - whole) // 2 + whole
    assert found.weights == 2 * (ROUTED // 4 + rest)
    assert found.gradients == 2 * found.weights
    assert found.optimizer == 12 * (ROUTED // 4 // 2 + rest // 4)  # experts are sharded over 2 ranks, the rest over 4
    (frozen,) = rank_memory(QWEN3_30B_A3B, layout, dtype="bfloat16", kind="frozen")
    assert frozen == (found.weights, 0, 0)


@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_have_what_is_theirs(is_tied: bool) -> None:
    config = replace(DENSE, is_tied=is_tied)
    first, last = rank_memory(config, ParallelOptions(ranks=2, pipeline=2), dtype="float32")
    assert last.weights == first.weights + 4 * 2048  # plus the last norm; both have a matrix of the vocabulary's size
    stages = rank_memory(config, ParallelOptions(ranks=2, pipeline=2), dtype="float32", kind="critic")
    assert stages[1].weights == last.weights - 4 * 151_936 * 2048 + 4 * 2049


def test_layers_keep_what_their_nodes_save() -> None:
    """Values of a dense layer: 2 bytes each for norms, attention and feed-forward part, and float32 per head."""
    options = LearnerOptions(dtype="bfloat16", micro_batch_tokens=100)
    norms, attention, feed_forward = 4 * 2048, 4 * 4096 + 3 * 512 + 192, 3 * 6144
    layer = 2 * (norms + attention + feed_forward) + 4 * (32 + 32 + 4)
    assert kept_activations(DENSE, ParallelOptions(), options) == [48 * 100 * layer]
    # The first of two stages starts two micro-batches before it finishes one.
    assert kept_activations(DENSE, ParallelOptions(ranks=2, pipeline=2), options) == [
        48 * 100 * layer,
        24 * 100 * layer,
    ]
    full = replace(options, recompute="full")
    assert kept_activations(DENSE, ParallelOptions(), full) == [48 * 100 * 2 * 2048]
