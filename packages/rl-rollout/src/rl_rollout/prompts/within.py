"""Calls into libraries that may never come back, given up after a while."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from rl_core.errors import RLError

ResultT = TypeVar("ResultT")


class _GivenUpError(BaseException):
    """Ends Python code whose time is up; what runs in a library goes on in its thread until the process ends."""


def call_within(
    deadline_s: float, call: Callable[[], ResultT], *, what: str, error: type[RLError], fails: str = "failed"
) -> ResultT:
    """What a call gives.

    Args:
        deadline_s: Longest wait for it.
        call: Lets other threads run while it works, as Python code does.
        what: Says in messages what it is.
        error: Raised where it fails, whatever it raises (a panic of Rust is no `Exception`), or takes longer.
        fails: What it does where it fails, in messages.
    """
    results: list[ResultT] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name=what[:80], daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_GivenUpError))
        raise error(f"{what} took longer than {deadline_s:g} s.")
    if failures:
        raise error(f"{what} {fails} ({type(failures[0]).__name__}: {failures[0]}).") from failures[0]
    return results[0]
