r"""External text, converted so that every encoder accepts it.

A Python string can contain lone surrogates (`\ud800`), from JSON, file names or code; UTF-8 cannot encode them. Queues,
journals, caches, records, tokenizers and trackers refuse them, so they are replaced on entry: in the text of models,
tools, rewards, data files and exceptions.
"""

import math
from collections.abc import Mapping

from rl_core.data.records import Json
from rl_core.errors import DataError

MAX_LEVELS = 100
"""Maximum depth of external JSON; deeper values overflow the interpreter's stack in encoders and decoders."""


def encodable(text: str) -> str:
    r"""Return text that UTF-8 can encode: lone surrogates become escapes, such as `\ud800`."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def encodable_json(value: Json, *, max_levels: int = MAX_LEVELS, keep_infinite: bool = False) -> Json:
    """Return JSON with every string and key passed through `encodable`; other values are unchanged.

    Args:
        value: The JSON value.
        max_levels: Maximum depth.
        keep_infinite: Keep NaN and infinities; otherwise they become None, as in queues and caches.

    Raises:
        DataError: The value is too deep, or two keys of an object become equal; the message follows "found".
    """
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float):
        return value if keep_infinite or math.isfinite(value) else None
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not max_levels:
        raise DataError(f"JSON of more than {MAX_LEVELS} levels.")
    if not isinstance(value, Mapping):
        return [encodable_json(part, max_levels=max_levels - 1, keep_infinite=keep_infinite) for part in value]
    read = {
        encodable(key) if isinstance(key, str) else key: encodable_json(
            part, max_levels=max_levels - 1, keep_infinite=keep_infinite
        )
        for key, part in value.items()
    }
    if len(read) < len(value):
        raise DataError("JSON with two keys that differ only in lone surrogates.")
    return read
