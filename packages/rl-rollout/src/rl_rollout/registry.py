"""Parts found by name: built in, or brought by another package through an entry point."""

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rl_core.errors import SettingsError


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'x'?", or an empty string when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class Registry:
    """Objects by name, imported when first asked for.

    Another package adds a name with an entry point in `group`; a built-in name cannot be replaced.
    """

    def __init__(self, kind: str, *, group: str, builtin: Mapping[str, str]) -> None:
        """Name the parts.

        Args:
            kind: What a part is, for messages, such as "agent loop".
            group: Entry point group.
            builtin: "module:attribute" by name.
        """
        self._kind = kind
        self._group = group
        self._builtin = dict(builtin)

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._builtin, *(point.name for point in entry_points(group=self._group))})

    def load(self, name: str) -> Any:
        """Import the part of this name.

        Raises:
            SettingsError: Nothing has this name, or two packages bring it.
        """
        if name in self._builtin:
            module, attribute = self._builtin[name].split(":")
            return getattr(import_module(module), attribute)
        points = list(entry_points(group=self._group, name=name))
        if not points:
            known = self.names()
            raise SettingsError(
                f"no {self._kind} is named {name!r}; known: {', '.join(known)}.{nearest_name(name, known)} "
                f"Packages add names with the entry point group {self._group!r}."
            )
        if len({point.value for point in points}) > 1:
            values = ", ".join(sorted(point.value for point in points))
            raise SettingsError(
                f"{self._kind} {name!r} is brought by several packages: {values}. Uninstall all but one."
            )
        return points[0].load()
