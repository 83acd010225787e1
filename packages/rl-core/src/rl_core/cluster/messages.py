"""What a role's process and its parent say to each other."""

import builtins
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_core import errors


class CallMessage(NamedTuple):
    """Call a method; the empty name makes the role's object."""

    call_id: int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class RemoteError(NamedTuple):
    """An error that crosses a process boundary as text."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Describe an error where it happened."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def rebuild(self, role: str) -> BaseException:
        """The same error where its class is known here, else a RoleError; with the remote traceback as a note."""
        kind = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        rebuilt: BaseException
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            rebuilt = kind(self.message)
        else:
            rebuilt = errors.RoleError(f"{role} raised {self.kind}: {self.message}")
        rebuilt.add_note(f"Traceback in {role}:\n{self.traceback}")
        return rebuilt


class ReplyMessage(NamedTuple):
    """The result of a call, or what it raised."""

    call_id: int
    result: Any
    error: RemoteError | None
