"""Log filter of the mcp library: reports a server's lines that are not messages once, and drops its tracebacks."""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rl_rollout.rewards.outputs import preview

TELL: ContextVar[Callable[[str], None] | None] = ContextVar("tell_of_garbage", default=None)
"""Function that receives each such line, shortened. It is set per connection, and inherited by the library's tasks."""

MAX_PREVIEW = 80


def is_message(record: logging.LogRecord) -> bool:
    """Drop the mcp library's log records about such lines, and report the lines."""
    error: Any = record.exc_info[1] if record.exc_info else None
    tell = TELL.get()
    if tell is None or record.funcName != "_parse_line" or not isinstance(error, ValueError):
        return True
    errors: list[Any] = getattr(error, "errors", list)()  # as pydantic has
    tell(preview(errors[0]["input"] if errors else str(error), max_characters=MAX_PREVIEW))
    return False


def drop_tracebacks() -> None:
    """Drop these records where TELL is set, and print nothing if no logging is configured. Can be called again."""
    library = logging.getLogger("mcp")
    if not library.handlers:
        library.addHandler(logging.NullHandler())  # otherwise Python prints each warning with its traceback
    logging.getLogger("mcp.client.stdio").addFilter(is_message)
