"""What a role and its caller say to each other."""

import builtins
import contextlib
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from rl_core import errors
from rl_core.cluster.role_spec import RoleSpec

Raised = TypeVar("Raised", bound=BaseException)

_KNOWN_MODULES = {module.__name__: module for module in (builtins, errors)}
_PLAIN = (str, bytes, int, float, bool, type(None))


class RemoteError(NamedTuple):
    """An error that crosses a process boundary as plain values.

    Attributes:
        module: Where its class is defined.
        kind: Name of its class.
        args: What it is made from; its text where that is not plain, or its class not a standard one or ours.
        state: Its plain attributes, such as `tensor` of a WeightProofError.
        notes: What was added to it on the way.
        traceback: Where it happened, with its causes, as text.
    """

    module: str
    kind: str
    args: tuple[Any, ...]
    state: Mapping[str, Any]
    notes: tuple[str, ...]
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Describe an error where it happened."""
        is_known = type(error).__module__ in _KNOWN_MODULES
        args, state = _reduced(error) if is_known else ((error,), {})
        return cls(
            module=type(error).__module__,
            kind=type(error).__name__,
            args=args if all(isinstance(arg, _PLAIN) for arg in args) else (_text(error),),
            state={name: value for name, value in state.items() if isinstance(value, _PLAIN)},
            notes=tuple(map(str, getattr(error, "__notes__", ()))),
            traceback="".join(traceback.format_exception(error)),
        )

    def rebuild(self, spec: RoleSpec) -> BaseException:
        """The same error where its class is a standard one or ours, else a RoleError; with the remote traceback."""
        kind = getattr(_KNOWN_MODULES.get(self.module), self.kind, None)
        text = ", ".join(str(arg) for arg in self.args)
        rebuilt: BaseException = errors.RoleError(f"{spec} raised {self.kind}: {text}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                rebuilt = kind(*self.args)
                rebuilt.__setstate__(dict(self.state))
            except TypeError:
                pass  # its class is not made from text alone; the RoleError says what it was
        for note in self.notes:
            rebuilt.add_note(note)
        rebuilt.add_note(f"Traceback in {spec}:\n{self.traceback}")
        return named(rebuilt, spec)


def named(error: Raised, spec: RoleSpec) -> Raised:
    """An error with attributes `role` and `rank`; those of a role further away stay."""
    with contextlib.suppress(AttributeError):  # of a class with slots
        if getattr(error, "role", None) is None:
            error.role, error.rank = spec.name, spec.rank  # type: ignore[attr-defined]
    return error


def _text(error: BaseException) -> str:
    """Its text; a class may fail to produce one, and its caller must not wait forever."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be made: {failure!r})"


def _reduced(error: BaseException) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What a standard error is made from, with what args leave out, such as an OSError's file."""
    reduced = error.__reduce__()
    args, *rest = reduced[1:] if isinstance(reduced, tuple) else (error.args,)
    return tuple(args), dict(rest[0] or {}) if rest else {}
