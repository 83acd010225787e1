"""A role for the tests of clusters: it answers, waits, raises, dies, and says where it lives."""

import asyncio
import builtins
import os
import signal
import threading
import time

from rl_core import errors


class Unknown(Exception):
    """An error that only this module knows."""


class Unreadable:
    """A value that pickles here and does not unpickle there."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ValueError("this cannot be made again")


class EchoRole:
    def __init__(self, greeting="hello", *, close_file=None, start_error="", hangs=False):
        if start_error:
            raise errors.SettingsError(start_error)
        if hangs:
            threading.Event().wait()
        self.greeting = greeting
        self.close_file = close_file
        self.is_open = asyncio.Event()
        self.num_begun = 0

    def greet(self, name, *, mark="!"):
        return f"{self.greeting} {name}{mark}"

    async def greet_async(self, name):
        await asyncio.sleep(0)
        return f"{self.greeting} {name}"

    async def company(self, _value):
        """Calls that began up to the end of this turn of the event loop."""
        self.num_begun += 1
        await asyncio.sleep(0)
        return self.num_begun

    def echo(self, value):
        return value

    def unreadable(self):
        return Unreadable()

    def unpicklable(self):
        return threading.Lock()

    def pid(self):
        return os.getpid()

    def environment(self, name):
        return os.environ.get(name)

    async def wait_until_open(self):
        await self.is_open.wait()
        return "opened"

    def open(self):
        self.is_open.set()

    async def wait_forever(self):
        await asyncio.Event().wait()

    def block(self, started):
        """Never answer, and let nothing else be answered; write a file first."""
        started.touch()
        while True:
            time.sleep(3600)

    def raise_error(self, kind, *args, **attributes):
        kind = getattr(errors, kind, None) or getattr(builtins, kind, None) or globals()[kind]
        raise kind(*args, **attributes)

    async def cancel(self):
        raise asyncio.CancelledError

    def fork_sleeper(self):
        """A child that holds on to everything that this process has open."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid

    def exit(self, status):
        os._exit(status)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        if self.close_file is not None:
            self.close_file.write_text("closed")


class AsyncCloseRole:
    def __init__(self, close_file):
        self.close_file = close_file

    async def close(self):
        await asyncio.sleep(0)
        self.close_file.write_text("closed")


class BadCloseRole:
    def close(self):
        raise RuntimeError("close failed")
