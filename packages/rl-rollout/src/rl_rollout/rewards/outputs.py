"""Reads the results of reward functions, and explains invalid ones."""

import contextlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_core.data import Json, encodable, encodable_json
from rl_core.errors import DataError
from rl_rollout.rewards.protocol import RewardResult

FLOAT32_MAX = 3.4e38
MAX_EXTRAS_BYTES = 1 << 16
MAX_COMPONENTS = 256
ONE_NUMBER = " Return one number for one response, as in `return 1.0`; TRL's functions return a list."
MAX_TEXT = 2000
"""Maximum length of a recorded failure text, in characters."""


def read_output(value: Any) -> RewardResult:
    """Convert a reward function's return value to a RewardResult.

    Raises:
        DataError: The value is not a finite number, a mapping with "reward", or a RewardResult of finite numbers whose
            extras are JSON of at most MAX_EXTRAS_BYTES.
    """
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise DataError(f"a mapping without 'reward'; it has {preview(sorted(map(str, value)))}. {_rename(value)}")
        components = {name: part for name, part in value.items() if name != "reward"}
        value = RewardResult(reward=value["reward"], components=components)
    elif not isinstance(value, RewardResult):
        return RewardResult(reward=_finite(value, name="reward"))
    if len(value.components) > MAX_COMPONENTS:
        raise DataError(f"{len(value.components)} components; expected at most {MAX_COMPONENTS}.")
    components = {encodable(str(name)): _finite(part, name=str(name)) for name, part in value.components.items()}
    extras = read_extras(value.extras, max_bytes=MAX_EXTRAS_BYTES) if value.extras else {}
    return RewardResult(reward=_finite(value.reward, name="reward"), components=components, extras=extras)


def preview(value: Any, *, max_characters: int = 80) -> str:
    """Return the repr of a value, cut to a length, even if the value's own repr raises."""
    if isinstance(value, int) and value.bit_length() > 4000:  # Python refuses to print so many digits
        return f"an integer of {value.bit_length()} bits"
    try:
        return cut(repr(value), max_characters=max_characters)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


def typed_preview(value: Any) -> str:
    """Return the preview of a value, and its type."""
    return f"{preview(value)} ({type(value).__name__})"


def preview_error(error: BaseException) -> str:
    """Return an error's type and text, cut to a length, even if the error's own str raises."""
    try:
        text = cut(str(error), max_characters=MAX_TEXT)
    except Exception:
        text = "(its text cannot be shown)"
    return encodable(f"{type(error).__name__}: {text}")


def cut(text: str, *, max_characters: int) -> str:
    """Cut a text to a maximum length, ending in "..."."""
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def read_extras(extras: Any, *, max_bytes: int | None = None) -> dict[str, Json]:
    """Return extras as JSON that every encoder accepts.

    Raises:
        DataError: The extras are not a JSON mapping, or larger than max_bytes.
    """
    if not isinstance(extras, Mapping):
        raise DataError(f"extras = {typed_preview(extras)}; expected a mapping.")
    try:
        text = json.dumps(dict(extras), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"extras that are not JSON ({preview_error(error)}).") from error
    if max_bytes is not None and len(text) > max_bytes:
        raise DataError(f"extras of {len(text)} bytes as JSON; expected at most {max_bytes}.")
    try:
        read: dict[str, Json] = encodable_json(json.loads(text))
    except (DataError, RecursionError) as error:
        raise DataError(f"extras with {error}") from error
    return read


def _rename(value: Mapping[Any, Any]) -> str:
    """Say what to return instead of a mapping without a reward."""
    verl = "Rename verl's 'score' to 'reward'" if "score" in value else "Return the number to train on as 'reward'"
    return f"{verl}, as in `return {{'reward': 1.0, 'acc': 1.0}}`."


def _finite(value: Any, *, name: str) -> float:
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        with contextlib.suppress(OverflowError):
            number = float(value)
            if abs(number) <= FLOAT32_MAX:  # False for NaN too
                return number
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise DataError(f"{with_article(value)}: it uses `yield`; expected a function that returns a number.")
    if inspect.isawaitable(value):
        discard(value)
        raise DataError(f"{with_article(value)} that nothing awaits; make the function an `async def` that awaits it.")
    hints = dict.fromkeys(("Tensor", "ndarray"), " Use `.item()` to get a single value.")
    hints |= {"list": ONE_NUMBER, "tuple": ONE_NUMBER, "NoneType": " Return a number for every response: `return 0.0`."}
    hints["str"] = " Return numbers as `float(...)`, and text in `RewardResult(extras=...)`."
    hint = hints.get(type(value).__name__, "")
    raise DataError(f"{cut(name, max_characters=80)} = {typed_preview(value)}; expected a finite number.{hint}")


def with_article(value: object) -> str:
    """Return the name of a value's type with its article, such as "an async generator"."""
    kind = type(value).__name__.replace("_", " ")
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def discard(unfinished: object) -> None:
    """Close an object that will never be awaited or iterated, so that Python does not warn."""
    close = getattr(unfinished, "close", None) or getattr(unfinished, "cancel", None)
    if callable(close):
        with contextlib.suppress(Exception):
            close()
