"""What a check that returns nothing says of its input."""

from collections.abc import Callable
from typing import Any

from rl_core.errors import RLError


def refusal(check: Callable[..., Any], *arguments: Any, **named: Any) -> str | None:
    """Return the message with which a check refuses its input; None if it accepts."""
    try:
        check(*arguments, **named)
    except RLError as error:
        return str(error)
    return None
