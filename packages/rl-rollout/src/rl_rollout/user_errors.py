"""Errors from user code: describe them, and distinguish them from cancellations."""

import asyncio
import dis
import sysconfig
import threading
import traceback
from pathlib import Path
from typing import Any

from rl_core.data import encodable
from rl_rollout.rewards.outputs import preview_error

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {"<frozen "})
"""Folders of installed code, which users did not write."""


def describe_raised(what: str, error: BaseException) -> str:
    """Describe an error with its type, text and place: "X raised ValueError: no (own.py, line 3, in f)".

    Args:
        what: The owner of the code, such as "the environment's step".
        error: The caught error, or the first of a group. The place is its innermost line outside installed libraries.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    every = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in every if not frame.filename.startswith(LIBRARIES)] or every
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return encodable(f"{what} raised {preview_error(error)}{place}")


def is_meant_for_us(error: BaseException) -> bool:
    """Return True for an outside cancellation or Ctrl-C, False for an exception that user code raised itself."""
    if isinstance(error, asyncio.CancelledError):
        task = _current_task()
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and not _was_raised_by_a_statement(error)
    return False


def ends_the_run(error: BaseException) -> bool:
    """Return True for exceptions that must leave a session: an outside cancellation, and any KeyboardInterrupt."""
    return isinstance(error, KeyboardInterrupt) or is_meant_for_us(error)


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return None


def _was_raised_by_a_statement(error: BaseException) -> bool:
    """Return True if the innermost frame has a `raise`. Signals interrupt other instructions or come from asyncio."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None or Path(innermost.tb_frame.f_code.co_filename).parent.name == "asyncio":
        return False
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]
