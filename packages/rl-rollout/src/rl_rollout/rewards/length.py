"""Rewards that depend only on a response's length in tokens, to add to another reward."""

import math
from typing import Any

from rl_core.errors import DataError, SettingsError
from rl_rollout.rewards.outputs import shown
from rl_rollout.rewards.protocol import RewardInput


class Overlong:
    """DAPO's soft punishment of responses that come near the length limit: 0 down to -penalty_factor.

    With length n, limit L = max_tokens and buffer B = buffer_tokens: 0 up to L - B; then
    ((L - B) - n) / B, which is -1 at L; -1 beyond; all times penalty_factor.

    Source: Yu et al. 2025, arXiv:2503.14476, equation 13.
    """

    is_quick = True

    def __init__(self, *, max_tokens: int, buffer_tokens: int, penalty_factor: float = 1.0) -> None:
        """Choose where the punishment starts, and how hard it is.

        Args:
            max_tokens: L, the longest response that is expected, usually the rollout's limit.
            buffer_tokens: B, the last tokens before L, in which the punishment grows.
            penalty_factor: Of the whole; the paper's is 1.

        Raises:
            SettingsError: A value is impossible.
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
    """Minus coefficient times how many tokens a response is off its target length (L1-Exact).

    Source: Aggarwal and Welleck 2025, arXiv:2503.04697, equation 1; theirs is coefficient = 0.0003.
    """

    is_quick = True

    def __init__(self, *, tokens: int | None = None, column: str | None = None, coefficient: float = 0.0003) -> None:
        """Choose the target.

        Args:
            tokens: The same target for all rows; or else:
            column: Column of the row that has it.
            coefficient: Punishment for each token.

        Raises:
            SettingsError: Not exactly one of tokens and column, or a value is impossible.
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
            DataError: The row has no target.
        """
        target: Any = self._tokens if self._column is None else given.columns.get(self._column)
        if not _is_whole(target):
            raise DataError(f"column {self._column!r} must be a whole number of tokens; found {shown(target)}.")
        return -self._coefficient * abs(len(given.response_ids) - int(target))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _at_least_zero(value: Any, *, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise SettingsError(f"{name} must be a number of at least 0; found {value!r}.")
    return float(value)
