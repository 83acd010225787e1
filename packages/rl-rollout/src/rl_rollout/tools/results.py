"""Text for the model from what a tool returned."""

import inspect
import json
from dataclasses import asdict, is_dataclass
from typing import Any

from rl_core.errors import ToolError
from rl_rollout.rewards.outputs import discard, with_article


def result_text(value: Any) -> str:
    """Return text unchanged, and any other value as JSON.

    Raises:
        ToolError: The value must be awaited or iterated.
    """
    if isinstance(value, str):
        return value
    refuse_unfinished(value)
    return json.dumps(value, ensure_ascii=False, default=_plain)


def refuse_unfinished(value: object) -> None:
    """Refuse a value that must be awaited or iterated. It is closed, so that Python does not warn.

    Raises:
        ToolError: The value is awaitable or a generator.
    """
    if inspect.isawaitable(value):
        discard(value)
        raise ToolError(
            f"the tool returned {with_article(value)} that was never awaited. It must be an `async def` that awaits it."
        )
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        discard(value)
        raise ToolError(f"the tool returned {with_article(value)}: it uses `yield`. It must return its result.")


def shortened(text: str, *, max_chars: int) -> str:
    """Return a text, cut to a maximum length with a note of how much is missing."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters]"


def _plain(value: Any) -> Any:
    refuse_unfinished(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
