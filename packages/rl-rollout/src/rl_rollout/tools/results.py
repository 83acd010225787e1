"""What a tool returned, as the model reads it."""

import contextlib
import inspect
import json
from dataclasses import asdict, is_dataclass
from typing import Any

from rl_core.errors import ToolError


def result_text(value: Any) -> str:
    """A text as it stands, anything else as JSON.

    Raises:
        ToolError: See `refuse_unfinished`.
    """
    if isinstance(value, str):
        return value
    refuse_unfinished(value)
    return json.dumps(value, ensure_ascii=False, default=_plain)


def refuse_unfinished(value: object) -> None:
    """Refuse what would give a result only if somebody awaited or iterated it; it is closed, so that it warns nobody.

    Raises:
        ToolError: It is such a thing.
    """
    if inspect.isawaitable(value):
        _call(value, "close" if inspect.iscoroutine(value) else "cancel")
        raise ToolError(
            f"the tool gave {_kind(value)} that was never awaited. It must be an `async def` that awaits it."
        )
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        _call(value, "close")
        raise ToolError(f"the tool gave {_kind(value)}: it uses `yield`. It must return its result.")


def shortened(text: str, *, max_chars: int) -> str:
    """A text's beginning with a note of what is not there, where it is longer than it may be."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters]"


def _plain(value: Any) -> Any:
    refuse_unfinished(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _kind(value: object) -> str:
    kind = type(value).__name__.replace("_", " ")
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _call(value: object, name: str) -> None:
    method = getattr(value, name, None)
    if callable(method):
        with contextlib.suppress(Exception):
            method()
