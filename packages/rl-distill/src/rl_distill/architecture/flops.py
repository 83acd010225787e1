"""How many floating-point operations a policy's forward pass takes."""

from collections.abc import Iterable

from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import count_parameters


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
    heads_width = config.num_heads * config.head_dim
    weights = count_parameters(config).multiplied
    if has_head:
        weights += config.vocab_size * config.hidden_size
    num_pairs = sum(size * (size + 1) / 2 for size in sizes)
    return 2.0 * weights * sum(sizes) + 4.0 * config.num_layers * heads_width * num_pairs
