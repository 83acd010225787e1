from dataclasses import replace

import pytest

from rl_distill.architecture.mixture_config import MixtureConfig
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import forward_flops, tensor_shapes

SMALL = PolicyConfig(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=100,
    max_position_embeddings=64,
    norm_eps=1e-6,
    rope_base=1e4,
    is_tied=False,
    initializer_range=0.02,
)


def test_flops_equal_hand_computed_ones():
    # Weights of a layer: queries and output 2*8*16, keys and values 2*8*8, feed-forward 3*8*16; of the head 8*100.
    weights = 2 * (256 + 128 + 384) + 800
    # 3 + 1 tokens; the 3 tokens have 1 + 2 + 3 pairs, each for scores and values in 2 layers of width 16.
    assert forward_flops(SMALL, [3, 1]) == 2 * weights * 4 + 4 * 2 * 16 * (6 + 1)
    assert forward_flops(SMALL, [3, 1], has_head=False) == 2 * (weights - 800) * 4 + 4 * 2 * 16 * 7
    assert forward_flops(SMALL, []) == 0.0


@pytest.mark.parametrize("is_tied", [True, False])
def test_every_matrix_of_the_policy_counts_but_the_embedding(is_tied):
    config = replace(SMALL, is_tied=is_tied)
    matrices = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    matrices.setdefault("lm_head.weight", matrices["model.embed_tokens.weight"])
    matrices.pop("model.embed_tokens.weight")
    weights = sum(rows * columns for rows, columns in matrices.values())
    assert forward_flops(config, [1]) == 2 * weights + 4 * 2 * 16


def test_of_a_mixture_the_experts_of_a_token_count():
    mixture = MixtureConfig(num_experts=8, top_k=2, norm_topk_prob=True, ffn_hidden_size=4, layers=(1,))
    config = replace(SMALL, architecture="Qwen3MoeForCausalLM", mixture=mixture)
    weights = 2 * 384 + 384 + 8 * 8 + 2 * 3 * 8 * 4 + 800
    assert forward_flops(config, [1]) == 2 * weights + 4 * 2 * 16
    shared = replace(config, mixture=replace(mixture, shared_ffn_hidden_size=6))
    assert forward_flops(shared, [1]) == 2 * (weights + 3 * 8 * 6) + 4 * 2 * 16
