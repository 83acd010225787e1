"""What a tool returned, as the model reads it."""

import inspect
import json
from dataclasses import asdict, is_dataclass
from typing import Any

from rl_core.errors import ToolError
from rl_rollout.rewards.outputs import discard, with_article


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
        discard(value)
        raise ToolError(
            f"the tool gave {with_article(value)} that was never awaited. It must be an `async def` that awaits it."
        )
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        discard(value)
        raise ToolError(f"the tool gave {with_article(value)}: it uses `yield`. It must return its result.")


def shortened(text: str, *, max_chars: int) -> str:
    """A text's beginning with a note of what is not there, where it is longer than it may be."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters]"


def _plain(value: Any) -> Any:
    refuse_unfinished(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
