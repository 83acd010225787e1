"""Count the floating-point operations of a policy's forward pass."""

from collections.abc import Iterable

from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import count_parameters


def forward_flops(config: PolicyConfig, lengths: Iterable[int], *, has_head: bool = True) -> float:
    """Return the floating-point operations of one forward pass; a backward pass needs about twice as many.

    Counts the matrix products that the model needs, with two operations per multiply-add: every weight matrix except
    the embedding once per token, and attention to the previous tokens. A mixture of experts counts only the experts to
    which a token is routed. Recomputation, padding and masked products do not count.

    Args:
        config: The policy's configuration.
        lengths: Length of each sequence in tokens.
        has_head: True if logits over the whole vocabulary are computed; False for a critic.
    """
    sizes = list(lengths)
    heads_width = config.num_heads * config.head_dim
    weights = count_parameters(config).multiplied
    if has_head:
        weights += config.vocab_size * config.hidden_size
    num_pairs = sum(size * (size + 1) / 2 for size in sizes)
    return 2.0 * weights * sum(sizes) + 4.0 * config.num_layers * heads_width * num_pairs
