"""Rewards of the workloads for the peer, in plain Python; a test compares them with ours."""


def arithmetic(text: str, truth: str, *, is_ended: bool) -> float:
    """As examples/arithmetic/reward.py: 1 for the right answer, with or without scratchpad, and the end token."""
    answer = text.rpartition(":")[2] if text.startswith(";") else text
    return float(is_ended and answer == truth)


def counting(text: str, truth: str, *, is_ended: bool) -> float:  # noqa: ARG001 - all rules are called alike
    """rl_rollout's exact_match."""
    return float(text.strip() == truth.strip())
