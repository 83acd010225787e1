"""Roles: plain classes that run in this process or in one of their own, called the same way."""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from rl_core.cluster.options import RestartPolicy, check_amounts
from rl_core.errors import SettingsError
from rl_core.record_fields import record, settings_record


@settings_record
class RoleSpec:
    """How to make one role.

    Attributes:
        name: Such as "engine" or "learner"; errors and logs carry it.
        factory: "module:qualname" of a class or function, plain or async, that returns the role's object. It gets a
            `RoleContext` where it has a parameter `context`.
        kwargs: Arguments of the factory.
        rank: Which of several equal roles; a group numbers its own.
        environment: Variables set in a process of its own, before anything is imported.
        cpus: CPUs it uses of a pool's slot; None uses the whole slot, or nothing without a pool.
        gpus: The same of GPUs.
        restart: Whether it is started again when it died.
    """

    name: str
    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: float | None = None
    gpus: float | None = None
    restart: RestartPolicy = field(default_factory=RestartPolicy)

    def __post_init__(self) -> None:
        """Refuse amounts that cannot be given."""
        check_amounts(f"role {self.name!r}", self.cpus or 0.0, self.gpus or 0.0)

    def __str__(self) -> str:
        """Such as engine[0]."""
        return f"{self.name}[{self.rank}]"


@record
class RoleContext:
    """What a role knows about its place among its equals.

    Attributes:
        name: The role's.
        rank: 0 to size - 1 in a group.
        size: How many were started together; 1 for a role that was started alone.
        address: Of its host, as the other ranks reach it: 127.0.0.1 on one machine, the node's on Ray.
        incarnation: 1, and one more for each restart.
    """

    name: str
    rank: int
    size: int
    address: str
    incarnation: int


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


async def make_object(factory_path: str, kwargs: Mapping[str, Any], context: RoleContext) -> Any:
    """A role's object, from a factory that may want to know its context.

    Raises:
        SettingsError: There is no such factory.
        Exception: Whatever the factory raised.
    """
    factory = load_factory(factory_path)
    if "context" not in kwargs and _takes_context(factory):
        kwargs = {**kwargs, "context": context}
    made = factory(**kwargs)
    return await made if inspect.isawaitable(made) else made


def _takes_context(factory: Any) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # of a class written in C
        return False
    return "context" in parameters and parameters["context"].kind is not inspect.Parameter.POSITIONAL_ONLY
