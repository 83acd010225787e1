"""What metrics of other trainers are called here."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_metrics.table import DEFINITIONS

OTHER = "other/"
"""What has no meaning here keeps its name behind this."""

MAX_NAME = 300
"""Longer names are cut: they are no names."""


@dataclass(frozen=True, slots=True)
class SameAs:
    """A metric of another trainer that means the same as one of this project, in the same unit.

    Attributes:
        theirs: Its name; `{source}` stands for any text, any other placeholder for one part without a slash.
        ours: Name of each metric here that it gives, with the same placeholders.
    """

    theirs: str
    ours: tuple[str, ...]


def translation(table: Sequence[SameAs], *, has_our_names: bool) -> Callable[[str], tuple[str, ...]]:
    """Gives the names here of a name of theirs; one that nothing fits is kept behind `OTHER`.

    Args:
        table: The first entry that fits is taken.
        has_our_names: True where a name that is defined here means the same there.
    """
    entries = [(_pattern(one.theirs), one.ours) for one in table]

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
