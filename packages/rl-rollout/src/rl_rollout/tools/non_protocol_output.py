"""What the library mcp logs of servers: lines that are no messages are told once, failures by our own errors."""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rl_rollout.rewards.outputs import shown

TELL: ContextVar[Callable[[str], None] | None] = ContextVar("tell_of_garbage", default=None)
"""Is given each such line, shortened; set where a connection lives, it holds in the tasks that the library starts."""

MAX_SHOWN = 80


def is_message(record: logging.LogRecord) -> bool:
    """A filter that drops what the library mcp logs of such lines."""
    error: Any = record.exc_info[1] if record.exc_info else None
    tell = TELL.get()
    if tell is None or record.funcName != "_parse_line" or not isinstance(error, ValueError):
        return True
    errors: list[Any] = getattr(error, "errors", list)()  # pydantic has them
    tell(shown(errors[0]["input"] if errors else str(error), max_characters=MAX_SHOWN))
    return False


def drop_tracebacks() -> None:
    """Drop them where TELL is set, and print nothing where nobody has configured logs; can be called again."""
    library = logging.getLogger("mcp")
    if not library.handlers:
        library.addHandler(logging.NullHandler())  # else Python prints each warning, with its traceback
    logging.getLogger("mcp.client.stdio").addFilter(is_message)
