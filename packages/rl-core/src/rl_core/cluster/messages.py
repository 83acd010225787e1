"""Errors between a role and its caller."""

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
        kind: Name of the class.
        args: Arguments of the constructor; only the text if they are not plain, or if the class is not from the
            standard library or this project.
        state: Plain attributes, such as `tensor` of a WeightProofError.
        notes: Notes added to the error.
        traceback: Formatted traceback, with causes.
    """

    module: str
    kind: str
    args: tuple[Any, ...]
    state: Mapping[str, Any]
    notes: tuple[str, ...]
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Capture an error in the process that raised it."""
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
        """Rebuild the error with its remote traceback; a RoleError unless its class is standard or this project's."""
        kind = getattr(_KNOWN_MODULES.get(self.module), self.kind, None)
        text = ", ".join(str(arg) for arg in self.args)
        rebuilt: BaseException = errors.RoleError(f"{spec} raised {self.kind}: {text}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                rebuilt = kind(*self.args)
                rebuilt.__setstate__(dict(self.state))
            except TypeError:
                pass  # its class needs other arguments; keep the RoleError
        for note in self.notes:
            rebuilt.add_note(note)
        rebuilt.add_note(f"Traceback in {spec}:\n{self.traceback}")
        return named(rebuilt, spec)


def named(error: Raised, spec: RoleSpec) -> Raised:
    """Set an error's attributes `role` and `rank`, unless a more remote role has set them."""
    with contextlib.suppress(AttributeError):  # a class with slots
        if getattr(error, "role", None) is None:
            error.role, error.rank = spec.name, spec.rank  # type: ignore[attr-defined]
    return error


def _text(error: BaseException) -> str:
    """Return an error's text, even if its `__str__` raises, so that the caller always gets an answer."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text is unavailable: {failure!r})"


def _reduced(error: BaseException) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a standard error's constructor arguments, including those missing in `args`, such as an OSError's file."""
    reduced = error.__reduce__()
    args, *rest = reduced[1:] if isinstance(reduced, tuple) else (error.args,)
    return tuple(args), dict(rest[0] or {}) if rest else {}
