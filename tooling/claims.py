"""What documents say about other projects: each has the version that was read or run, and the month.

A mark is text such as "verl 0.9.1, 2026-11". `tests` checks that each project has one in every document that compares
us with it, and `release` refuses marks that are too old.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

PROJECTS = ("verl", "TRL", "TransferQueue", "OpenRLHF", "slime", "Miles", "NeMo-RL", "AReaL", "SkyRL", "prime-rl")
NAMES = "|".join(PROJECTS)
NAMED = re.compile(rf"(?<![\w./`#-])({NAMES})(?![\w/`-])")
MARK = re.compile(rf"\b({NAMES}) (\d+(?:\.\d+)+|main),\s+(\d{{4}})-(\d\d)\b")
MAX_MONTHS = 4
DOCUMENTS = (
    "README.md",
    "benchmarks/README.md",
    "docs/comparison.md",
    "docs/performance.md",
    "docs/guides/from-verl.md",
    "docs/guides/reliability.md",
)
"""Documents that compare us with other projects."""


@dataclass(frozen=True)
class Mark:
    """A version of another project ("main" if it has none), and the month in which it was read or run."""

    project: str
    version: str
    year: int
    month: int

    def months_before(self, today: date) -> int:
        """Return the number of months from this month to a day's."""
        return (today.year - self.year) * 12 + today.month - self.month


def marks(text: str) -> list[Mark]:
    """Return the marks in a text."""
    return [Mark(found[1], found[2], int(found[3]), int(found[4])) for found in MARK.finditer(text)]


def unmarked(text: str) -> Iterator[str]:
    """Yield a sentence for each project that a text names without any mark of it; code does not count."""
    marked = {mark.project for mark in marks(text)}
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    for project in dict.fromkeys(NAMED.findall(prose)):
        if project not in marked:
            yield f'{project} needs its version (or main) and the month, such as "{project} 1.2, 2026-11".'


def outdated(root: Path, today: date) -> list[str]:
    """Return a sentence for each mark that is too old for a release."""
    return [
        f"{name} describes {mark.project} {mark.version} as of {mark.year}-{mark.month:02}, more than {MAX_MONTHS} "
        "months ago. Check what it says with today's version, and update the mark."
        for name in DOCUMENTS
        for mark in dict.fromkeys(marks((root / name).read_text()))
        if mark.months_before(today) > MAX_MONTHS
    ]
