"""Rewards of the workloads for the peer's side, with nothing but Python; a test holds them against our side's."""


def arithmetic(text: str, truth: str, *, is_ended: bool) -> float:
    """examples/arithmetic/reward.py: 1 for the right answer, after a scratchpad or at once, properly ended."""
    answer = text.rpartition(":")[2] if text.startswith(";") else text
    return float(is_ended and answer == truth)


def counting(text: str, truth: str, *, is_ended: bool) -> float:  # noqa: ARG001 - all rules are called alike
    """rl_rollout's exact_match."""
    return float(text.strip() == truth.strip())
