"""Deadlines for calls into libraries that may never return."""

import ctypes
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rl_core.errors import RLError

ResultT = TypeVar("ResultT")


class _CallThread(threading.Thread):
    """Makes one call after another, because starting a thread takes longer than most calls."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.outcomes: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Run queued calls until None arrives."""
        while (call := self.calls.get()) is not None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = call(), None
            except BaseException as failure:
                outcome = None, failure
            self.outcomes.put(outcome)
            del call, outcome


_idle: list[_CallThread] = []
os.register_at_fork(after_in_child=_idle.clear)


def call_within(
    deadline_s: float, call: Callable[[], ResultT], *, what: str, error: type[RLError], fails: str = "failed"
) -> ResultT:
    """Run a call in a worker thread and return its result.

    Args:
        deadline_s: Maximum seconds to wait.
        call: Must let other threads run while it works, as Python code does.
        what: Description of the call, for messages.
        error: Exception type to raise if the call times out or raises anything (a Rust panic is not an `Exception`).
        fails: Verb phrase for a failed call, for messages.
    """
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _CallThread()
    worker.name = what[:80]
    worker.calls.put(call)
    try:
        outcome: tuple[ResultT, BaseException | None] = worker.outcomes.get(timeout=deadline_s)
    except Empty:
        worker.calls.put(None)
        # ends Python code; library code continues in its thread until the process ends
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(SystemExit))
        raise error(f"{what} took longer than {deadline_s:g} s.") from None
    _idle.append(worker)
    result, failure = outcome
    if failure is not None:
        raise error(f"{what} {fails} ({type(failure).__name__}: {failure}).") from failure
    return result
