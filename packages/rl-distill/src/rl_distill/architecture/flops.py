"""How many floating-point operations a policy's forward pass takes."""

from collections.abc import Iterable

from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import count_parameters


def forward_flops(config: PolicyConfig, lengths: Iterable[int], *, has_head: bool = True) -> float:
    """Floating-point operations of one forward pass over sequences; a backward pass takes about twice as many.

    Counts the matrix products that the model needs, with two operations per multiply-add: every weight matrix except
    the embedding once per token, and attention over the previous tokens. A mixture counts only the experts that a token
    is routed to. Recomputation, padding and products that are masked out later do not count.

    Args:
        config: The policy's configuration.
        lengths: Length of each sequence in tokens.
        has_head: Whether logits of the whole vocabulary are computed; a critic computes none.
    """
    sizes = list(lengths)
    heads_width = config.num_heads * config.head_dim
    weights = count_parameters(config).multiplied
    if has_head:
        weights += config.vocab_size * config.hidden_size
    num_pairs = sum(size * (size + 1) / 2 for size in sizes)
    return 2.0 * weights * sum(sizes) + 4.0 * config.num_layers * heads_width * num_pairs
