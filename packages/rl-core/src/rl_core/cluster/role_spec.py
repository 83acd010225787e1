"""Specifications of roles: plain classes that run in this or another process with the same calls."""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from rl_core.cluster.options import RestartPolicy, check_gpus
from rl_core.errors import SettingsError
from rl_core.record_fields import NonNegativeFloat, record, settings_record


@settings_record
class RoleSpec:
    """The specification of one role.

    Attributes:
        name: Name in errors and logs, such as "engine" or "learner".
        factory: "module:qualname" of a class or function, sync or async, that returns the role's object. It receives a
            `RoleContext` if it has a parameter `context`.
        kwargs: Keyword arguments of the factory.
        rank: Rank among equal roles; a group sets it.
        environment: Environment variables of its own process, set before any import.
        cpus: CPUs of a pool's slot that it uses; None uses the whole slot, or none without a pool.
        gpus: The same for GPUs.
        restart: Policy for restarts after a death.
    """

    name: str
    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: NonNegativeFloat | None = None
    gpus: NonNegativeFloat | None = None
    restart: RestartPolicy = field(default_factory=RestartPolicy)

    def __post_init__(self) -> None:
        """Check the GPUs."""
        check_gpus(f"role {self.name!r}", self.gpus or 0.0)

    def __str__(self) -> str:
        """Return the name with the rank, such as engine[0]."""
        return f"{self.name}[{self.rank}]"


@record
class RoleContext:
    """A role's position in its group.

    Attributes:
        name: Name of the role.
        rank: Rank in the group, 0 to size - 1.
        size: Number of roles in the group; 1 for a single role.
        address: Host address for the other ranks: 127.0.0.1 on one machine, the node's address on Ray.
        incarnation: Starts at 1 and increases by one with each restart.
    """

    name: str
    rank: int
    size: int
    address: str
    incarnation: int


def load_factory(path: str) -> Any:
    """Import "module:qualname".

    Raises:
        SettingsError: The path has no colon, or the module or the name does not exist.
    """
    module_name, _, qualname = path.partition(":")
    if not (module_name and qualname):
        raise SettingsError(f'a factory must have the form "module:name"; found {path!r}.')
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its imports does not
        raise SettingsError(f"module {module_name!r} of the factory {qualname!r} does not exist.") from None
    for part in qualname.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise SettingsError(f"module {module_name!r} has no {qualname!r}.") from None
    return found


def takes_context(factory: Any) -> bool:
    """Return True if a factory has a parameter for the role's context."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a class written in C
        return False
    return "context" in parameters and parameters["context"].kind is not inspect.Parameter.POSITIONAL_ONLY
