"""What every placement gives: one life of a role, and who starts it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.cluster.calls import Call
from rl_core.cluster.pools import PoolBook, Slot
from rl_core.cluster.role_spec import RoleContext, RoleSpec
from rl_core.errors import RLError


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """One incarnation to start.

    Attributes:
        spec: The role's.
        context: What it is told; the launcher fills the address in.
        slot: Where in its pool, if it has one.
        deadline_s: For its object to be made.
    """

    spec: RoleSpec
    context: RoleContext
    slot: Slot | None
    deadline_s: float


class Incarnation(Protocol):
    """A role from its start to its end; never started again."""

    @property
    def pid(self) -> int:
        """Process id, on its own host."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it was closed or died."""
        ...

    @property
    def last_heard(self) -> str:
        """The last thing that it said, and when."""
        ...

    @property
    def under_way(self) -> str:
        """The calls that it has not answered, and for how long."""
        ...

    async def stacks(self, deadline_s: float) -> str:
        """What its process does, whether its event loop turns or not; why that is not known, where it is not."""
        ...

    async def call(self, method: str, parcel: Any) -> Any:
        """Call a method with what its launcher's `pack` made of the arguments."""
        ...

    def watch(self, callback: Callable[[RLError], None]) -> None:
        """Have this called, on any thread, when it dies otherwise than by `close` and `kill`; before calls fail."""
        ...

    async def close(self) -> None:
        """Call the object's `close`, and end the process, with its children; kill it where that takes too long."""
        ...

    async def kill(self, because: str) -> None:
        """End it at once; calls that wait are told why."""
        ...


class Launcher(Protocol):
    """Starts incarnations in one kind of place.

    Attributes:
        place: Such as "this machine"; errors say it.
        settle_s: When a rank raises, how long a death is waited for that may be the reason: peers of a killed rank
            raise at once, and its death is noticed later.
    """

    place: str
    settle_s: float

    @property
    def pools(self) -> PoolBook:
        """The pools of this kind of place."""
        ...

    async def open(self) -> None:
        """Be ready to start roles; can be called again.

        Raises:
            RoleError: The place cannot be reached.
        """
        ...

    def pack(self, call: Call) -> Any:
        """A call, ready to be sent to its roles.

        Raises:
            RoleError: An argument cannot be sent.
        """
        ...

    async def launch(self, birth: Birth) -> Incarnation:
        """Start one, and wait until its object is made; nothing is left where that fails.

        Raises:
            DeadlineError: It was not ready in time.
            RoleDiedError: Its process ended on the way.
            Exception: Whatever the factory raised.
        """
        ...

    async def close(self) -> None:
        """Let go of what it has itself."""
        ...
