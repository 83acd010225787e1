"""Translation of other trainers' metric names."""

import functools
import re
from collections.abc import Callable, Mapping

from rl_metrics.definitions.table import DEFINITIONS

OTHER = "other/"
"""Prefix of metrics without a counterpart here."""

MAX_NAME = 300
"""Maximum length of a name, in characters; longer ones are cut."""


Names = Mapping[str, tuple[str, ...]]
"""Names here, by the name in another trainer, of metrics with the same meaning and unit.

`{source}` matches any text; any other placeholder matches one part without a slash.
"""


def translation(table: Names, *, has_our_names: bool) -> Callable[[str], tuple[str, ...]]:
    """Return a function from another trainer's name to the names here; unknown names get the prefix `OTHER`.

    Args:
        table: Translations; the first match is used.
        has_our_names: Whether names defined here mean the same in the other trainer.
    """
    entries = [(_pattern(theirs), ours) for theirs, ours in table.items()]

    @functools.lru_cache(maxsize=10_000)
    def names(name: str) -> tuple[str, ...]:
        for pattern, ours in entries:
            if found := pattern.fullmatch(name):
                return tuple(one.format(**found.groupdict()) for one in ours)
        if has_our_names and DEFINITIONS.find(name) is not None:
            return (name,)
        return (OTHER + name[:MAX_NAME],)

    return names


def _pattern(name: str) -> re.Pattern[str]:
    literals_and_placeholders = re.split(r"\{([a-z_]+)\}", name)
    parts = [re.escape(part) for part in literals_and_placeholders]
    for index in range(1, len(parts), 2):
        placeholder = literals_and_placeholders[index]
        parts[index] = f"(?P<{placeholder}>{'.+' if placeholder == 'source' else '[^/]+'})"
    return re.compile("".join(parts))
