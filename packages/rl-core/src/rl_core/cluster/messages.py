"""What a role's process and its parent say to each other."""

import builtins
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_core import errors

_KNOWN_MODULES = {module.__name__: module for module in (builtins, errors)}
_PLAIN = (str, bytes, int, float, bool, type(None))


class CallMessage(NamedTuple):
    """Call a method; the empty name makes the role's object."""

    call_id: int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class RemoteError(NamedTuple):
    """An error that crosses a process boundary as plain values.

    Attributes:
        module: Where its class is defined.
        kind: Name of its class.
        args: What it is made from; its text where that is not plain, or its class not a standard one or ours.
        state: Its plain attributes, such as `tensor` of a WeightProofError.
        traceback: Where it happened, as text.
    """

    module: str
    kind: str
    args: tuple[Any, ...]
    state: Mapping[str, Any]
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Describe an error where it happened."""
        is_known = type(error).__module__ in _KNOWN_MODULES
        args, state = _reduced(error) if is_known else ((error,), {})
        return cls(
            module=type(error).__module__,
            kind=type(error).__name__,
            args=args if all(isinstance(arg, _PLAIN) for arg in args) else (str(error),),
            state={name: value for name, value in state.items() if isinstance(value, _PLAIN)},
            traceback="".join(traceback.format_exception(error)),
        )

    def rebuild(self, role: str) -> BaseException:
        """The same error where its class is a standard one or ours, else a RoleError; with the remote traceback."""
        kind = getattr(_KNOWN_MODULES.get(self.module), self.kind, None)
        text = ", ".join(str(arg) for arg in self.args)
        rebuilt: BaseException = errors.RoleError(f"{role} raised {self.kind}: {text}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                rebuilt = kind(*self.args)
                rebuilt.__setstate__(dict(self.state))
            except TypeError:
                pass  # its class is not made from text alone; the RoleError says what it was
        rebuilt.add_note(f"Traceback in {role}:\n{self.traceback}")
        return rebuilt


def _reduced(error: BaseException) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What a standard error is made from, with what args leave out, such as an OSError's file."""
    reduced = error.__reduce__()
    args, *rest = reduced[1:] if isinstance(reduced, tuple) else (error.args,)
    return tuple(args), dict(rest[0] or {}) if rest else {}


class ReplyMessage(NamedTuple):
    """The result of a call, or what it raised."""

    call_id: int
    result: Any
    error: RemoteError | None
