"""Pairs of settings: rows that try each pair that a check accepts, and the reason for each pair that it refuses."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

Row = Mapping[str, Any]
"""Settings by name."""
Items = frozenset[tuple[str, Any]]
"""Some settings with their values, such as a pair."""


class Problem(NamedTuple):
    """A line in which a check refuses a row.

    Attributes:
        names: The settings that the line names.
        text: The line.
    """

    names: Collection[str]
    text: str


class Crossing:
    """All pairs of the values of some settings.

    A line that refuses a row refuses all rows with the values of the settings that it names. So few rows are checked.

    Attributes:
        rows: Settings that the check accepts; together they have every pair that it does not refuse.
        refused: The pairs that no accepted row has: with the line that refuses them, or with all that name one of the
            two settings and together leave no value of the others.
    """

    def __init__(
        self, settings: Mapping[str, Sequence[Any]], problems: Callable[[Row], Iterable[Problem]], *, seed: int = 0
    ) -> None:
        """Cross the settings.

        Args:
            settings: Possible values of each setting. They must be hashable.
            problems: The check, of a complete row.
            seed: Other seeds give other rows with the same pairs.
        """
        self._settings, self._check = settings, problems
        self._lines: dict[Items, str] = {}
        self._others: dict[tuple[str, Any], list[Items]] = {}
        self.rows: list[Row] = []
        self.refused: dict[Items, str] = {}
        chance, pairs = random.Random(seed), list(self.all_pairs())
        chance.shuffle(pairs)
        missing = dict.fromkeys(pairs)
        while missing:
            pair = next(iter(missing))
            row = None if self._line(dict(pair)) else self._completed(dict(pair), missing, chance)
            if row is None:
                del missing[pair]
                self.refused[pair] = ""
            elif not self._learns(row):
                self.rows.append({name: row[name] for name in settings})
                for found in combinations(row.items(), 2):
                    missing.pop(frozenset(found), None)
        for pair in self.refused:
            named = [line for items, line in self._lines.items() if items & pair]
            self.refused[pair] = self._line(dict(pair)) or "\n".join(dict.fromkeys(named))

    def all_pairs(self) -> Iterator[Items]:
        """Yield every pair of values of different settings."""
        for (one, values), (other, others) in combinations(self._settings.items(), 2):
            yield from (frozenset({(one, a), (other, b)}) for a in values for b in others)

    def tried(self) -> set[Items]:
        """Return the pairs in the rows."""
        return {frozenset(pair) for row in self.rows for pair in combinations(row.items(), 2)}

    def left_over(self) -> list[Items]:
        """Return the pairs that are neither tried nor refused by lines that name a setting of theirs."""
        tried = self.tried()
        return [pair for pair in self.all_pairs() if pair not in tried and not self.refused.get(pair)]

    def wrongly_refused(self, num_tries: int) -> list[Row]:
        """Return rows that the check accepts in spite of a line that refused others.

        Args:
            num_tries: How many accepted rows to change, for each line, to the values of the settings that it names.
        """
        chance = random.Random(0)
        changed = (
            {**row, **dict(items)}
            for items in self._lines
            for row in chance.sample(self.rows, min(num_tries, len(self.rows)))
        )
        return [row for row in changed if not list(self._check(row))]

    def __str__(self) -> str:
        """Return the numbers of pairs."""
        whole, tried = len(list(self.all_pairs())), len(self.tried())
        return f"{whole} pairs: {tried} tried in {len(self.rows)} rows, {len(self.refused)} refused"

    def _learns(self, row: Row) -> bool:
        """Check a row, and remember what its lines refuse."""
        found = list(self._check(row))
        for one in found:
            items = frozenset((name, row[name]) for name in one.names)
            if not items:
                raise AssertionError(f"this line names no setting: {one.text}")
            if items not in self._lines:
                self._lines[items] = one.text
                for item in items:
                    self._others.setdefault(item, []).append(items - {item})
        return bool(found)

    def _line(self, part: Row) -> str:
        """Return the line that refuses a part of a row; "" if none does."""
        items = part.items()
        return next((line for refused, line in self._lines.items() if refused <= items), "")

    def _completed(self, part: Row, missing: Collection[Items], chance: random.Random) -> Row | None:
        """Return a row with this part and as many missing pairs as a greedy choice finds; None if all are refused."""
        possible = {
            name: [one for one in values if not self._is_refused(part, (name, one))]
            for name, values in self._settings.items()
            if name not in part
        }
        if not possible:
            return part
        name = min(possible, key=lambda one: min(len(possible[one]), 2))
        added = {one: sum(frozenset({(name, one), old}) in missing for old in part.items()) for one in possible[name]}
        for value in sorted(added, key=lambda one: (-added[one], chance.random())):
            if row := self._completed({**part, name: value}, missing, chance):
                return row
        return None

    def _is_refused(self, part: Row, item: tuple[str, Any]) -> bool:
        """Whether a known line refuses a setting beside this part."""
        return any(others <= part.items() for others in self._others.get(item, ()))
