"""How many floating-point operations a policy's forward pass takes."""

from collections.abc import Iterable

from rl_distill.policy_config import PolicyConfig


def forward_flops(config: PolicyConfig, lengths: Iterable[int], *, has_head: bool = True) -> float:
    """Floating-point operations of one forward pass over sequences; a backward pass takes about twice as many.

    Counted are the matrix products that the model needs, two operations for each product and sum: every weight matrix
    but the embedding once for each token (of a mixture the experts that a token goes through), and attention over
    the tokens so far. What is recomputed, padded or masked out afterwards is not counted.

    Args:
        config: Of the policy.
        lengths: Tokens of each sequence.
        has_head: Whether logits of the whole vocabulary are computed; a critic computes none.
    """
    sizes = list(lengths)
    hidden, heads_width = config.hidden_size, config.num_heads * config.head_dim
    attention = 2 * hidden * heads_width + 2 * hidden * config.num_key_value_heads * config.head_dim
    weights = sum(attention + _feed_forward_weights(config, layer) for layer in range(config.num_layers))
    if has_head:
        weights += config.vocab_size * hidden
    num_pairs = sum(size * (size + 1) / 2 for size in sizes)
    return 2.0 * weights * sum(sizes) + 4.0 * config.num_layers * heads_width * num_pairs


def _feed_forward_weights(config: PolicyConfig, layer: int) -> int:
    """Weights of a layer's feed-forward part that a token is multiplied with."""
    mixture = config.mixture
    if mixture is None or not config.is_mixture(layer):
        return 3 * config.hidden_size * config.ffn_hidden_size
    width = mixture.top_k * mixture.ffn_hidden_size + mixture.shared_ffn_hidden_size
    return config.hidden_size * (mixture.num_experts + 3 * width)
