"""Parts found by name: built in, or brought by another installed package through an entry point.

A package adds a policy loss in its pyproject.toml, for example, and is then found by the names that it gives:

    [project.entry-points."rl_distill.policy_losses"]
    my_loss = "my_package.losses:my_loss"
"""

import difflib
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from rl_core.errors import SettingsError

PartT = TypeVar("PartT")


class Registry(Generic[PartT]):
    """Parts of one kind by name; nothing is imported from other packages before its name is asked for.

    Attributes:
        kind: What a part is, for messages, such as "agent loop".
    """

    def __init__(self, kind: str, builtin: Mapping[str, PartT | str], *, group: str | None = None) -> None:
        """Name the parts.

        Args:
            kind: What a part is.
            builtin: Parts by name; a string is "module:attribute", imported when it is asked for.
            group: Entry point group in which other packages offer theirs; None keeps the registry closed.
        """
        self.kind = kind
        self._builtin = dict(builtin)
        self._group = group
        self._offered: tuple[list[str], list[EntryPoint]] = ([], [])

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self.names())})"

    def names(self) -> list[str]:
        """Every name that `get` knows, sorted."""
        return sorted({*self._builtin, *(point.name for point in self._entry_points())})

    def get(self, name: str) -> PartT:
        """The part of this name.

        Raises:
            SettingsError: Nothing has this name, several packages offer it, or its package cannot be imported.
        """
        offered = {point.value: point for point in self._entry_points() if point.name == name}
        if len(offered) + (name in self._builtin) > 1:
            built_in = " and built in" if name in self._builtin else ""
            raise SettingsError(
                f"{self.kind} {name!r} is offered by {', '.join(sorted(offered))}{built_in}. Uninstall or rename all "
                "but one."
            )
        if name in self._builtin:
            part = self._builtin[name]
            return cast(PartT, _imported(part)) if isinstance(part, str) else part
        if not offered:
            hint = f" Packages add names with the entry point group {self._group!r}." if self._group else ""
            raise SettingsError(unknown_name(self.kind, name, self.names()) + hint)
        ((place, point),) = offered.items()
        try:
            return cast(PartT, point.load())
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"{self.kind} {name!r} cannot be loaded from {place}: {error}.") from error

    def _entry_points(self) -> Iterable[EntryPoint]:
        """Those of now: reading every installed package takes 20 ms, so they are kept while the path is the same."""
        if self._group and self._offered[0] != sys.path:
            self._offered = (list(sys.path), list(entry_points(group=self._group)))
        return self._offered[1]


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Message for a name that nothing has: the nearest, and all known ones."""
    names = sorted(known)
    return f"unknown {kind} {name!r}.{nearest_name(name, names)} Known: {', '.join(names) or 'none'}."


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'x'?", or an empty string when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _imported(path: str) -> object:
    module, attribute = path.split(":")
    return getattr(import_module(module), attribute)
