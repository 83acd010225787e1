"""Translation of other trainers' metric names."""

import functools
import re
from collections.abc import Callable, Mapping

from rl_metrics.definitions.table import DEFINITIONS

OTHER = "other/"
"""What has no meaning here keeps its name behind this."""

MAX_NAME = 300
"""Longer names are cut: they are no names."""


Names = Mapping[str, tuple[str, ...]]
"""Metrics of another trainer that mean the same as some of this project, in the same unit: by its name there, the names
here. `{source}` stands for any text, any other placeholder for one part without a slash."""


def translation(table: Names, *, has_our_names: bool) -> Callable[[str], tuple[str, ...]]:
    """Gives the names here of a name of theirs; one that nothing fits is kept behind `OTHER`.

    Args:
        table: The first entry that fits is taken.
        has_our_names: True where a name that is defined here means the same there.
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
