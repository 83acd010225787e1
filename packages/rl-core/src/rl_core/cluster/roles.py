"""Roles: plain classes that run in this process or in one of their own, called the same way."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """How to make one role.

    Attributes:
        name: Such as "engine" or "learner"; errors and logs carry it.
        factory: "module:qualname" of a class or function that returns the role's object.
        kwargs: Arguments of the factory.
        rank: Which of several equal roles.
        environment: Variables set in a process of its own, before anything is imported.
    """

    name: str
    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Such as engine[0]."""
        return f"{self.name}[{self.rank}]"


class RoleHandle(Protocol):
    """A running role."""

    @property
    def spec(self) -> RoleSpec:
        """What it was made from."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it was closed or its process ended."""
        ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, sync or async; calls may overlap.

        Raises:
            RoleError: The role's process died; the message says how.
            NotReadyError: The role was closed.
            Exception: Whatever the method raised, with the remote traceback as a note.
        """
        ...

    async def close(self) -> None:
        """Call the object's `close`, where it has one, and end its process. Can be called twice."""
        ...


class Cluster(Protocol):
    """Starts roles, and ends them together."""

    async def start(self, spec: RoleSpec, *, deadline_s: float) -> RoleHandle:
        """Make a role.

        Raises:
            DeadlineError: It was not ready in time.
            RoleError: Its process died on the way.
        """
        ...

    async def close(self) -> None:
        """End every role that it started."""
        ...


def load_factory(path: str) -> Any:
    """Import "module:qualname".

    Raises:
        SettingsError: The path has no colon, there is no such module, or the name is not in it.
    """
    module_name, _, qualname = path.partition(":")
    if not (module_name and qualname):
        raise SettingsError(f"a factory is written module:name; found {path!r}.")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise SettingsError(f"there is no module {module_name!r}, which should have {qualname!r}.") from None
    for part in qualname.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise SettingsError(f"module {module_name!r} has no {qualname!r}.") from None
    return found
