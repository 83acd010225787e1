"""The caller's side of every remote role: pending calls and the last message received."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from rl_core.cluster.messages import named
from rl_core.cluster.processes.packing import Packed, pack, unpack
from rl_core.cluster.role_spec import RoleSpec
from rl_core.errors import RoleError

STACKS = "(stacks)"
"""Name of the request for stacks; not a valid method name."""
MAX_NAMED = 5


class RoleCall(NamedTuple):
    """A call before it is sent.

    Attributes:
        specs: Roles that receive the call.
        method: Name of the method; empty to make the object.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    specs: Sequence[RoleSpec]
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def pack(self) -> Packed:
        """Return the call as bytes.

        Raises:
            RoleError: An argument cannot be pickled.
        """
        try:
            return pack((self.method, self.args, dict(self.kwargs)))
        except TypeError as error:
            first = self.specs[0]
            whom = str(first) if len(self.specs) == 1 else f"{first} to {self.specs[-1]}"
            raise RoleError(
                f"the arguments of {describe_call(self.method)} cannot be sent to {whom}: {error}. Pass plain "
                "values, arrays, or objects whose class can be imported there.",
                role=first.name,
                rank=first.rank if len(self.specs) == 1 else None,
            ) from error


class _PendingCall(NamedTuple):
    """A pending call, with its start on the monotonic clock."""

    method: str
    future: Future[Any]
    began_at: float


class Calls:
    """The pending calls to one incarnation of a role; thread-safe."""

    def __init__(self, spec: RoleSpec) -> None:
        """Start without pending calls."""
        self._spec = spec
        self._waiting: dict[int, _PendingCall] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._failure: Callable[[str], BaseException] | None = None
        self._heard: tuple[str, float] | None = None

    def begin(self, method: str) -> tuple[int, Future[Any]]:
        """Register a call; return its number and its future, which has already failed if the role has ended."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a caller that gives up must not race with the answer
        with self._lock:
            number = next(self._numbers)
            failure = self._failure
            if failure is None:
                self._waiting[number] = _PendingCall(method, future, time.monotonic())
        if failure is not None:
            future.set_exception(failure(method))
        return number, future

    def forget(self, number: int) -> None:
        """Remove a finished or abandoned call, whose answer is then dropped."""
        with self._lock:
            self._waiting.pop(number, None)

    def settle(self, number: int, packed: Packed) -> None:
        """Complete a call with its answer."""
        with self._lock:
            waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        if waiting.method != STACKS:
            self._heard = f"the answer of {describe_call(waiting.method)}", time.monotonic()
        try:
            is_result, value = unpack(packed)
        except Exception as error:  # for example, this process cannot import a class
            text = (
                f"{self._spec} answered {describe_call(waiting.method)} with a value that cannot be unpickled: "
                f"{error!r}."
            )
            unreadable = named(RoleError(text), self._spec)
            unreadable.__cause__ = error
            waiting.future.set_exception(unreadable)
            return
        if is_result:
            waiting.future.set_result(value)
        else:
            waiting.future.set_exception(value.rebuild(self._spec))

    def fail(self, number: int, error: BaseException) -> None:
        """Fail a call that cannot be answered."""
        with self._lock:
            waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.future.set_exception(error)

    def fail_all(self, failure: Callable[[str], BaseException]) -> None:
        """Fail every pending and future call with the error that this returns for its method."""
        with self._lock:
            self._failure = failure
            waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            call.future.set_exception(failure(call.method))

    @property
    def last_heard(self) -> str:
        """Describe the last message, such as "the answer of 'step', 12 s ago"."""
        if self._heard is None:
            return "nothing"
        what, when = self._heard
        return f"{what}, {time.monotonic() - when:.1f} s ago"

    @property
    def under_way(self) -> str:
        """Describe the pending calls, such as "'step' for 12.0 s"; the longest first."""
        with self._lock:
            waiting = [call for call in self._waiting.values() if call.method != STACKS]
        return describe_under_way([(call.method, call.began_at) for call in waiting])


def describe_under_way(calls: Sequence[tuple[str, float]]) -> str:
    """Describe calls and their durations from their start times; "no call" without calls."""
    now, longest = time.monotonic(), sorted(calls, key=lambda call: call[1])
    words = [f"{describe_call(method)} for {now - began_at:.1f} s" for method, began_at in longest[:MAX_NAMED]]
    more = f" and {len(longest) - MAX_NAMED} more calls" if len(longest) > MAX_NAMED else ""
    return ", ".join(words) + more if words else "no call"


def describe_call(method: str) -> str:
    """Describe a call; the empty name makes the object."""
    return f"{method!r}" if method else "its start"
