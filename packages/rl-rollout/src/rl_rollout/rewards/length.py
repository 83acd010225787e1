"""Rewards that depend only on a response's length in tokens, to add to another reward."""

import math
from typing import Any

from rl_core.errors import DataError, SettingsError
from rl_rollout.rewards.outputs import preview
from rl_rollout.rewards.protocol import RewardInput


class Overlong:
    """DAPO's soft overlong punishment: 0 for short responses, down to -penalty_factor at the length limit.

    With limit L = max_tokens and buffer B = buffer_tokens, the reward is 0 up to length L - B, falls linearly to -1 at
    L, and stays -1 beyond, all times penalty_factor.

    Source: Yu et al. 2025, arXiv:2503.14476, equation 13.
    """

    is_quick = True

    def __init__(self, *, max_tokens: int, buffer_tokens: int, penalty_factor: float = 1.0) -> None:
        """Set where the punishment starts, and its size.

        Args:
            max_tokens: L: maximum expected response length, usually the rollout's limit.
            buffer_tokens: B: number of tokens before L over which the punishment grows.
            penalty_factor: Factor of the punishment; 1 in the paper.

        Raises:
            SettingsError: A value is out of range.
        """
        if not _is_whole(max_tokens) or not _is_whole(buffer_tokens) or not 1 <= buffer_tokens <= max_tokens:
            raise SettingsError(
                "reward function 'overlong' needs whole numbers 1 <= buffer_tokens <= max_tokens; found "
                f"buffer_tokens = {buffer_tokens!r}, max_tokens = {max_tokens!r}."
            )
        self._penalty_factor = _at_least_zero(penalty_factor, name="penalty_factor of 'overlong'")
        self._max_tokens = max_tokens
        self._buffer_tokens = buffer_tokens

    def __call__(self, given: RewardInput) -> float:
        """Score one response."""
        over = len(given.response_ids) - (self._max_tokens - self._buffer_tokens)
        share = min(max(over / self._buffer_tokens, 0.0), 1.0)
        return -share * self._penalty_factor if share else 0.0


class LengthTarget:
    """Minus the coefficient times the difference between a response's length and its target, in tokens (L1-Exact).

    Source: Aggarwal and Welleck 2025, arXiv:2503.04697, equation 1, where coefficient = 0.0003.
    """

    is_quick = True

    def __init__(self, *, tokens: int | None = None, column: str | None = None, coefficient: float = 0.0003) -> None:
        """Set the target.

        Args:
            tokens: Target length of all rows. Give either this or `column`.
            column: Column with the target length of each row.
            coefficient: Punishment per token of difference.

        Raises:
            SettingsError: Both or neither of tokens and column are given, or a value is out of range.
        """
        if (tokens is None) == (column is None) or (tokens is not None and not _is_whole(tokens)):
            raise SettingsError(
                "reward function 'length_target' needs either tokens, a whole number, or column; found "
                f"tokens = {tokens!r}, column = {column!r}."
            )
        self._tokens = tokens
        self._column = column
        self._coefficient = _at_least_zero(coefficient, name="coefficient of 'length_target'")

    def __call__(self, given: RewardInput) -> float:
        """Score one response.

        Raises:
            DataError: The row's target is not a whole number.
        """
        target: Any = self._tokens if self._column is None else given.columns.get(self._column)
        if not _is_whole(target):
            raise DataError(f"column {self._column!r} must be a whole number of tokens; found {preview(target)}.")
        return -self._coefficient * abs(len(given.response_ids) - int(target))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _at_least_zero(value: Any, *, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise SettingsError(f"{name} must be a number of at least 0; found {value!r}.")
    return float(value)
