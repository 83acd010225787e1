"""Users' code: load it from files, describe its errors, and call it with deadlines in threads or tasks."""

import asyncio
import dis
import importlib.util
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.data import encodable
from rl_core.errors import SettingsError, ToolError
from rl_core.registry import Registry, nearest_name
from rl_rollout.rewards.calls import CallThreads
from rl_rollout.rewards.outputs import preview, preview_error

TRACEBACK_LINES = 6
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {"<frozen "})
"""Folders of installed code, which users did not write."""
FOREVER_S = 1e9
MAX_RUNNING = 256
"""Maximum number of concurrent calls, including abandoned ones, so that hanging functions cannot use up all threads."""
LEFT_BEHIND: set[asyncio.Task[Any]] = set()
"""Abandoned tasks that still run. References keep them from being collected."""

Outcome = tuple[Any, BaseException | None]
"""Return value of a call, and the exception that it raised."""


def find_in(registry: Registry[Any], reference: str, *, is_fresh: bool = False) -> Any:
    """Return the entry of a registry, or an attribute of a user's file as `path.py:name`.

    Args:
        registry: The registry. Its description appears in messages.
        reference: The registered name, or the file and name.
        is_fresh: See `load_attribute`.

    Raises:
        SettingsError: No such name or file exists.
    """
    if ":" in reference or reference.endswith(".py"):
        return load_attribute(reference, kind=registry.kind, is_fresh=is_fresh)
    return registry.get(reference)


def load_attribute(reference: str, *, kind: str, is_fresh: bool = False) -> Any:
    """Import a file and return one attribute of it.

    Args:
        reference: `path.py:name`. A relative path starts at the working directory.
        kind: The kind of object for messages, such as "tool".
        is_fresh: Import the file again. Otherwise, two names of one file share its module state.

    Raises:
        SettingsError: The file is missing, raises on import, or has no such name.
    """
    path_text, separator, name = reference.rpartition(":")
    if not separator or not path_text or not name:
        raise SettingsError(f"{kind} {reference!r} must be given as path.py:name.")
    path = Path(path_text)
    if not path.is_file():
        raise SettingsError(f"{kind} {reference!r}: the file {path.absolute()} does not exist.")
    module = _import_file(path, what=f"{kind} {reference!r}", is_fresh=is_fresh)
    if not hasattr(module, name):
        own = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise SettingsError(
            f"{kind} {reference!r}: {path} has no {name!r}; it has {', '.join(own) or 'nothing'}."
            f"{nearest_name(name, own)}"
        )
    return getattr(module, name)


def _import_file(path: Path, *, what: str, is_fresh: bool) -> ModuleType:
    version = f"{path.resolve()} {path.stat().st_mtime_ns}"
    module_name = f"rl_file_{path.stem}_{blake2b(version.encode(), digest_size=4).hexdigest()}"
    if module_name in sys.modules and not is_fresh:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{what}: {path} is not a Python file; expected a name ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        tail = "".join(traceback.format_exception(error)).rstrip().splitlines()[-TRACEBACK_LINES:]
        raise SettingsError(f"{what}: importing {path} raised:\n" + "\n".join(tail)) from error
    return module


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


async def outcome_within(timeout_s: float, call: Awaitable[Any]) -> Outcome:
    """Await a call in a task. After timeout_s or a cancellation it is cancelled, and abandoned if it refuses.

    Raises:
        TimeoutError: The call took longer than timeout_s. One that the call raises is returned.
    """
    task = asyncio.create_task(_caught(call))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
            LEFT_BEHIND.add(task)
            task.add_done_callback(LEFT_BEHIND.discard)
    if not task.done():
        raise TimeoutError
    return (None, asyncio.CancelledError()) if task.cancelled() else task.result()


async def _caught(call: Awaitable[Any]) -> Outcome:
    """Return a call's result or its exception. A SystemExit of a task, for example, would end the event loop."""
    try:
        return await call, None
    except BaseException as error:
        if is_meant_for_us(error):
            raise
        return None, error


class BlockingCalls:
    """Runs functions in threads, and returns their outcome to the caller."""

    def __init__(self) -> None:
        """Create the pool. Threads start in `run`."""
        self._threads: CallThreads[Callable[[], Any], Outcome] = CallThreads(self._call)
        self._num_running = 0
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], Any], *, timeout_s: float = FOREVER_S) -> Outcome:
        """Call a function once. After timeout_s or a cancellation, its thread is abandoned.

        Raises:
            TimeoutError: The call took longer than timeout_s. One that the function raises is returned.
            ToolError: MAX_RUNNING earlier calls are still running.
        """
        with self._lock:
            if self._num_running >= MAX_RUNNING:
                raise ToolError(f"{self._num_running} earlier calls are still running; no other can start.")
            self._num_running += 1
        outcomes = await self._threads.run([function], timeout_s=timeout_s)
        if not outcomes:
            raise TimeoutError
        return outcomes[0]

    def close(self) -> None:
        """Stop the idle threads."""
        self._threads.close()

    def _call(self, function: Callable[[], Any]) -> Outcome:
        try:
            return function(), None
        except SystemExit as error:
            return None, RuntimeError(f"it called sys.exit({preview(error.code)})")
        except Exception as error:
            return None, error
        except BaseException as error:  # nothing interrupts or cancels this thread, so the function raised it
            return None, RuntimeError(f"it raised {preview_error(error)}")
        finally:
            with self._lock:
                self._num_running -= 1
