"""Interfaces of every placement: incarnations of roles and their launcher."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.cluster.calls import RoleCall
from rl_core.cluster.pools import PoolBook, Slot
from rl_core.cluster.role_spec import RoleContext, RoleSpec
from rl_core.errors import RLError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The request to start one incarnation.

    Attributes:
        spec: Specification of the role.
        context: The role's context; the launcher fills in the address.
        slot: Its slot in a pool, if it has one.
        deadline_s: Maximum time to make its object.
    """

    spec: RoleSpec
    context: RoleContext
    slot: Slot | None
    deadline_s: float


class RoleProcess(Protocol):
    """One run of a role from start to end; a restart creates a new incarnation."""

    @property
    def pid(self) -> int:
        """Process id, on its own host."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it is closed or dead."""
        ...

    @property
    def last_heard(self) -> str:
        """Describe its last message, with the time."""
        ...

    @property
    def under_way(self) -> str:
        """Describe its unanswered calls, with durations."""
        ...

    async def stacks(self, deadline_s: float) -> str:
        """Return its process's stacks, even if its event loop is blocked; otherwise the reason why they are unknown."""
        ...

    async def call(self, method: str, parcel: Any) -> Any:
        """Call a method with arguments from the launcher's `pack`."""
        ...

    def watch(self, callback: Callable[[RLError], None]) -> None:
        """Register a callback for a death not caused by `close` or `kill`; runs on any thread, before calls fail."""
        ...

    async def close(self) -> None:
        """Call the object's `close` and end the process with its children; kill it if that takes too long."""
        ...

    async def kill(self, because: str) -> None:
        """End it at once; pending calls fail with the reason."""
        ...


class Launcher(Protocol):
    """Starts incarnations in one kind of placement.

    Attributes:
        place: Name for error messages, such as "this machine".
        pools: The pools of this kind of placement.
        settle_s: Maximum wait, after a rank raises, for the death that caused it: peers of a killed rank raise at once,
            and its death is noticed later.
    """

    place: str
    pools: PoolBook
    settle_s: float

    async def open(self) -> None:
        """Prepare to start roles. Idempotent.

        Raises:
            RoleError: The placement cannot be reached.
        """
        ...

    def pack(self, call: RoleCall) -> Any:
        """Pack a call for sending to its roles.

        Raises:
            RoleError: An argument cannot be sent.
        """
        ...

    async def launch(self, request: LaunchRequest) -> RoleProcess:
        """Start an incarnation and wait for its object; a failure leaves nothing behind.

        Raises:
            DeadlineError: The object was not ready in time.
            RoleDiedError: The process ended during the start.
            Exception: Whatever the factory raised.
        """
        ...

    async def close(self) -> None:
        """Release the launcher's own resources."""
        ...
