"""What code of the user raises: told in words, and distinguished from what is meant for us."""

import asyncio
import dis
import sysconfig
import threading
import traceback
from pathlib import Path
from typing import Any

from rl_core.data import encodable
from rl_rollout.rewards.outputs import shown_error

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {"<frozen "})
"""Where the code is that users did not write."""


def describe_raised(what: str, error: BaseException) -> str:
    """What raised an error, its type and text, and where: "X raised ValueError: no (own.py, line 3, in f)".

    Args:
        what: Whose code it is, such as "the environment's step".
        error: Caught, the first one of a group; the place is its innermost line outside of installed libraries.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    every = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in every if not frame.filename.startswith(LIBRARIES)] or every
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return encodable(f"{what} raised {shown_error(error)}{place}")


def is_meant_for_us(error: BaseException) -> bool:
    """True for a cancellation or Ctrl-C from outside, False for what the user's code raised itself."""
    if isinstance(error, asyncio.CancelledError):
        task = _current_task()
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and not _was_raised_by_a_statement(error)
    return False


def ends_the_run(error: BaseException) -> bool:
    """True for what no session may keep to itself: a cancellation from outside, and any KeyboardInterrupt."""
    return isinstance(error, KeyboardInterrupt) or is_meant_for_us(error)


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return None


def _was_raised_by_a_statement(error: BaseException) -> bool:
    """True when the innermost frame has a `raise`; a signal interrupts other instructions, or comes from asyncio."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None or Path(innermost.tb_frame.f_code.co_filename).parent.name == "asyncio":
        return False
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]
