"""Registries of components by name, built in or added by installed packages through entry points.

For example, a package adds a policy loss in its pyproject.toml:

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
    """Components of one kind by name; another package is imported only when one of its components is requested.

    Attributes:
        kind: Kind of component for error messages, such as "agent loop".
    """

    def __init__(self, kind: str, builtin: Mapping[str, PartT | str], *, group: str | None = None) -> None:
        """Register the built-in components.

        Args:
            kind: Kind of component, for error messages.
            builtin: Components by name; a string is "module:attribute", imported on first use.
            group: Entry point group for components of other packages; None allows only built-in ones.
        """
        self.kind = kind
        self._builtin = dict(builtin)
        self._group = group
        self._offered: tuple[list[str], list[EntryPoint]] = ([], [])

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self.names())})"

    def names(self) -> list[str]:
        """Return every name that `get` accepts, sorted."""
        return sorted({*self._builtin, *(point.name for point in self._entry_points())})

    def get(self, name: str) -> PartT:
        """Return the component with this name.

        Raises:
            SettingsError: No component has this name, several packages define it, or its package cannot be imported.
        """
        offered = {point.value: point for point in self._entry_points() if point.name == name}
        if len(offered) + (name in self._builtin) > 1:
            built_in = " and built in" if name in self._builtin else ""
            raise SettingsError(
                f"{self.kind} {name!r} is defined by {', '.join(sorted(offered))}{built_in}. Uninstall or rename all "
                "but one."
            )
        if name in self._builtin:
            part = self._builtin[name]
            return cast(PartT, _imported(part)) if isinstance(part, str) else part
        if not offered:
            hint = f" Packages can add names with the entry point group {self._group!r}." if self._group else ""
            raise SettingsError(unknown_name(self.kind, name, self.names()) + hint)
        ((place, point),) = offered.items()
        try:
            return cast(PartT, point.load())
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"{self.kind} {name!r} cannot be loaded from {place}: {error}.") from error

    def _entry_points(self) -> Iterable[EntryPoint]:
        """Return the current entry points, cached while sys.path is unchanged: reading all packages takes 20 ms."""
        if self._group and self._offered[0] != sys.path:
            self._offered = (list(sys.path), list(entry_points(group=self._group)))
        return self._offered[1]


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return an error message for an unknown name, with the nearest name and all known names."""
    names = sorted(known)
    return f"unknown {kind} {name!r}.{nearest_name(name, names)} Known: {', '.join(names) or 'none'}."


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint such as " Did you mean 'x'?", or an empty string if no name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _imported(path: str) -> object:
    module, attribute = path.split(":")
    return getattr(import_module(module), attribute)
