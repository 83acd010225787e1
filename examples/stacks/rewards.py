"""A reward that all examples of this folder share, written once."""

from rl_rollout import RewardInput, quick


@quick
def digit_share(given: RewardInput) -> float:
    """The share of digits in the response."""
    return sum(character.isdecimal() for character in given.response_text) / max(len(given.response_text), 1)
