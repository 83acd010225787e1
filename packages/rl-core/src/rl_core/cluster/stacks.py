"""Reports of roles: their activity, the Python stacks of their threads, and where their event loop's tasks wait."""

import asyncio
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

MAX_TEXT = 64_000
NOT_ANSWERED = "It has not answered since"
NOT_KNOWN = "Its stacks are not known"
"""Text after the heading in the report of an unresponsive process; see `is_silent`."""
TURN_S = 0.2
"""Maximum time for one turn of an event loop before it counts as blocked."""
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """A role's own view of its current activity.

    Attributes:
        doing: Description of the activity, as `status` prints it.
        counts: Further counts, by name; a change is progress.
    """

    doing: str
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """The report of one role.

    Attributes:
        name: Name such as "rollouter", "engine 1" or "learner[0]"; brackets mark ranks of one role.
        state: State of `Role`: starting, serving, restarting, dead or closed.
        since_s: Seconds in this state; for an unresponsive role, seconds without an answer.
        doing: Description of its activity; empty if unknown.
        stack: Text from `Role.stacks`; empty if not requested.
        counts: Further counts by name, such as "running".
        is_answering: False if it did not answer a request in time.
    """

    name: str
    state: str = "serving"
    since_s: float = 0.0
    doing: str = ""
    stack: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)
    is_answering: bool = True


def process_report(
    name: str, stack: str, *, asked_s: float, state: str = "serving", num_running: int = 0
) -> RoleReport:
    """Create the report of a role's subordinate process, such as an engine or a rank, from its stacks.

    Args:
        name: Name such as "engine[0]".
        stack: Text from `Role.stacks`.
        asked_s: Minimum seconds that an unresponsive process has not answered.
        state: See `RoleReport`.
        num_running: Number of running requests.
    """
    is_answering = not is_silent(stack)
    return RoleReport(
        name=name,
        state=state,
        since_s=0.0 if is_answering else asked_s,
        stack=stack,
        counts={"running": float(num_running)},
        is_answering=is_answering,
    )


def process_stacks(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """Return the Python stacks of all threads of this process and of an event loop's tasks.

    Callable from any thread, even while the loop or the main thread is blocked; only code that holds the GIL delays the
    answer. Threads or tasks with equal stacks are merged.

    Args:
        loop: Event loop of the tasks; None omits tasks.

    Returns:
        At most MAX_TEXT characters.
    """
    at = time.strftime("%H:%M:%S")
    parts = [f"pid {os.getpid()} at {at}", *_describe_threads()]
    if loop is not None:
        parts += [_describe_loop(loop), *_describe_tasks(loop)]
    return cut_middle("\n".join(parts), MAX_TEXT)


def is_silent(text: str) -> bool:
    """Return True if a role's stacks report an unresponsive process."""
    return NOT_ANSWERED in text or NOT_KNOWN in text


def cut_middle(text: str, length: int) -> str:
    """Shorten a text to the maximum length by removing its middle."""
    if len(text) <= length:
        return text
    half = max((length - 60) // 2, 0)
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n... {left_out} characters omitted ...\n{text[len(text) - half :]}"


def _describe_threads() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    asking = threading.get_ident()
    frames = sys._current_frames()
    found = []
    for ident in sorted(frames, key=lambda one: one != threading.main_thread().ident):
        name = names.get(ident, f"thread {ident}, not started by Python")
        asks = " (takes this snapshot)" if ident == asking else ""
        found.append((f"{name}{asks}", "".join(traceback.format_stack(frames[ident])).rstrip()))
    return [f"thread {who} (most recent call last):\n{stack}" for who, stack in _merged(found)]


def _describe_loop(loop: asyncio.AbstractEventLoop) -> str:
    if loop.is_closed() or not loop.is_running():
        return "its event loop is not running"
    if _runs_here(loop):
        return "its event loop is responsive: it runs this request"
    has_turned = threading.Event()
    try:
        loop.call_soon_threadsafe(has_turned.set)
    except RuntimeError:  # closed meanwhile
        return "its event loop is not running"
    if has_turned.wait(TURN_S):
        return "its event loop is responsive"
    return (
        f"its event loop did not respond within {TURN_S:g} s: a synchronous method or another blocking call occupies it"
    )


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _describe_tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    try:
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    except RuntimeError as error:  # the set changes concurrently
        return [f"its tasks cannot be listed: {error}"]
    found = [(task.get_name(), _describe_task(task)) for task in tasks]
    return [f"task {who} (most recent call last):\n{stack}" for who, stack in _merged(found)] or ["it has no tasks"]


def _describe_task(task: "asyncio.Task[Any]") -> str:
    """Describe where a task waits: its chain of awaited coroutines, which a task's own stack does not show."""
    lines: list[str] = []
    waits: Any = task.get_coro()
    for _ in range(MAX_DEPTH):
        frame = _frame_of(waits)
        if frame is None:
            break
        lines.append(_describe_frame(frame))
        waits = _awaited_by(waits)
    if waits is not None:
        lines.append(f"  waits for {_describe_awaited(waits)}")
    return "\n".join(lines) or "  (it has just ended)"


def _frame_of(coroutine: Any) -> FrameType | None:
    for name in ("cr_frame", "gi_frame", "ag_frame"):
        frame = getattr(coroutine, name, None)
        if frame is not None:
            return frame  # type: ignore[no-any-return]
    return None


def _awaited_by(coroutine: Any) -> Any:
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(coroutine, name):
            return getattr(coroutine, name)
    return None


def _describe_frame(frame: FrameType) -> str:
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    place = f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
    return f"{place}\n    {source}" if source else place


def _describe_awaited(awaited: Any) -> str:
    """Describe an awaited object without addresses and numbers, so that equal waits compare equal."""
    if isinstance(awaited, asyncio.Task):
        return f"a task of {getattr(awaited.get_coro(), '__qualname__', 'a coroutine')}"
    return f"a {type(awaited).__name__}"


def _merged(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge entries with the same stack into one that lists their names."""
    names: dict[str, list[str]] = {}
    for name, stack in found:
        names.setdefault(stack, []).append(name)
    return [(_several(them), stack) for stack, them in names.items()]


def _several(names: list[str]) -> str:
    listed = ", ".join(names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"
