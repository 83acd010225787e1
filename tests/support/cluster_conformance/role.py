"""A role for checks of clusters: it answers, waits, raises, prints, dies, and reports its process."""

import asyncio
import builtins
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from rl_core import errors
from rl_core.cluster import RoleContext


class UnknownError(Exception):
    """An error that only this module defines."""


class WordlessError(Exception):
    """An error whose text cannot be created."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("no words")


class Unreadable:
    """A value that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        """Reduce to a call that fails."""
        return _refuse, ()


def _refuse() -> NoReturn:
    raise ValueError("this cannot be made again")


class EchoRole:
    """A role that does what a check requests."""

    def __init__(
        self,
        greeting: str = "hello",
        *,
        context: RoleContext,
        close_file: Path | None = None,
        start_error: str = "",
        flag: Path | None = None,
    ) -> None:
        """Set the greeting and the faults.

        Args:
            greeting: Text before a name.
            context: The cluster's context.
            close_file: File that gets "closed" when the role closes; its suffix becomes the rank.
            start_error: Text of an error to raise at the start.
            flag: File that makes the role die if it contains "die", the rank, and optionally the incarnation.
        """
        if start_error:
            raise errors.SettingsError(start_error)
        words = flag.read_text().split() if flag is not None and flag.exists() else []
        if words in (["die", str(context.rank)], ["die", str(context.rank), str(context.incarnation)]):
            self.kill()
        self.context = context
        self.greeting = greeting
        self.close_file = close_file
        self.is_open = asyncio.Event()
        self.num_begun = 0
        self.seen: list[Any] = []

    def greet(self, name: str, *, mark: str = "!") -> str:
        """Greet from a plain method."""
        return f"{self.greeting} {name}{mark}"

    async def greet_async(self, name: str) -> str:
        """Greet from an async method."""
        await asyncio.sleep(0)
        return f"{self.greeting} {name}"

    def place(self) -> RoleContext:
        """Return the role's context."""
        return self.context

    def see(self, value: Any) -> None:
        """Record a value."""
        self.seen.append(value)

    def seen_values(self) -> list[Any]:
        """Return and clear the recorded values, in order."""
        seen, self.seen = self.seen, []
        return seen

    async def company(self, _value: Any) -> int:
        """Return the number of calls started by the end of this turn of the event loop."""
        self.num_begun += 1
        await asyncio.sleep(0)
        number = self.num_begun
        await asyncio.sleep(0.01)
        self.num_begun = 0
        return number

    def echo(self, value: Any) -> Any:
        """Return the value."""
        return value

    def named(_self, **given: Any) -> dict[str, Any]:
        """Return the keyword arguments."""
        return given

    def unreadable(self) -> Unreadable:
        """Return a result that cannot be unpickled."""
        return Unreadable()

    def unpicklable(self) -> Any:
        """Return a result that cannot be pickled."""
        return threading.Lock()

    def pid(self) -> int:
        """Return the id of the role's process."""
        return os.getpid()

    def umask(self) -> int:
        """Return the umask of this process."""
        mask = os.umask(0)
        os.umask(mask)
        return mask

    def environment(self, name: str) -> str | None:
        """Return an environment variable."""
        return os.environ.get(name)

    async def wait_until_open(self) -> int:
        """Wait for `open`; return the rank."""
        await self.is_open.wait()
        return self.context.rank

    def open(self) -> None:
        """Release waiting calls."""
        self.is_open.set()

    def shut(self) -> None:
        """Make later calls wait."""
        self.is_open.clear()

    async def wait_forever(self) -> None:
        """Never answer."""
        await asyncio.Event().wait()

    async def raise_on(self, rank: int) -> None:
        """Raise on one rank; the others hang, as in a collective."""
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} has no rows")
        await asyncio.Event().wait()

    async def fail_with(self, rank: int, died: Path) -> None:
        """Kill the process of one rank; the others then raise at once, as peers of a collective do."""
        if self.context.rank == rank:
            died.touch()
            await asyncio.sleep(0.2)
            self.kill()
        while not died.exists():
            await asyncio.sleep(0.01)
        raise RuntimeError("connection closed by peer")

    def block(self, started: Path) -> None:
        """Write a file, then block the event loop for ever."""
        started.touch()
        while True:
            time.sleep(3600)

    def hold_interpreter(self, started: Path) -> None:
        """Block all threads for ever, in C code that waits for a lock it already holds."""
        libc = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(256)
        libc.pthread_mutex_init(mutex, None)
        libc.pthread_mutex_lock(mutex)
        started.touch()
        libc.pthread_mutex_lock(mutex)

    def raise_error(self, kind: str, *args: Any, **attributes: Any) -> None:
        """Raise an error of this class, with a note."""
        found = getattr(errors, kind, None) or getattr(builtins, kind, None) or globals()[kind]
        error = found(*args, **attributes)
        error.add_note("while checking")
        raise error

    async def cancel(self) -> None:
        """Raise CancelledError."""
        raise asyncio.CancelledError

    def say(self, text: str) -> None:
        """Print."""
        sys.stdout.write(f"{text}\n")

    def start_child(self, *, own_session: bool) -> int:
        """Start a process that does not end by itself, in its own session or with an empty environment."""
        command = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
        environment: dict[str, str] | None = None if own_session else {}  # like programs that overwrite theirs
        return subprocess.Popen(command, start_new_session=own_session, env=environment).pid

    def fork_sleeper(self) -> int:
        """Start a child that inherits all open files of this process."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid

    def leave(self, kind: str, *args: Any) -> NoReturn:
        """Raise an error that ends the process, while a thread continues."""
        threading.Thread(target=threading.Event().wait).start()
        raise getattr(builtins, kind)(*args)

    def exit(self, status: int) -> None:
        """Exit without output."""
        os._exit(status)

    def kill(self) -> None:
        """Kill the process as the kernel does when memory runs out."""
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        """Write "closed" to the file."""
        if self.close_file is not None:
            path = self.close_file.with_suffix(f".{self.context.rank}")
            path.write_text("closed")


class AsyncEchoRole(EchoRole):
    """An `EchoRole` with an async close method."""

    async def close(self) -> None:  # type: ignore[override]
        """Write "closed" to the file."""
        await asyncio.sleep(0)
        super().close()


class BadCloseRole:
    """A role that cannot close."""

    def close(self) -> None:
        """Fail."""
        raise RuntimeError("close failed")


async def make_slowly(*, context: RoleContext, hangs_on: int = -1) -> EchoRole:
    """Create a role asynchronously; hang on the given rank."""
    if context.rank == hangs_on:
        await asyncio.Event().wait()
    await asyncio.sleep(0)
    return EchoRole("slowly", context=context)
