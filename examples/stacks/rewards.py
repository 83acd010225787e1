"""The reward of all examples in this folder."""

from rl_rollout import RewardInput, quick


@quick
def digit_share(given: RewardInput) -> float:
    """Return the share of digits in the response."""
    return sum(character.isdecimal() for character in given.response_text) / max(len(given.response_text), 1)
