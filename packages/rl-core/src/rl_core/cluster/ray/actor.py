"""The Ray actor of a role; Ray's workers import this module."""

import asyncio
import contextlib
import os
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray.util
from numpy.typing import NDArray

from rl_core.cluster.processes.guard import ProcessFamily, end_family, start_guard
from rl_core.cluster.processes.output import log_header, read_tail
from rl_core.cluster.processes.packing import Packed, pack
from rl_core.cluster.processes.stack_dump import register_dump
from rl_core.cluster.served import ServedRole
from rl_core.cluster.stacks import process_stacks

Wire = tuple[bytes, list[NDArray[np.uint8]]]
"""A packed value in Ray's form; its arrays are read in place from shared memory."""


class Printed(NamedTuple):
    """A file that receives an actor's output.

    Attributes:
        path: Path on its node, or on a shared drive.
        inode: Distinguishes it from another host's file with the same path.
        start: Offset at which this incarnation's output begins.
    """

    path: str
    inode: int
    start: int


class ActorHello(NamedTuple):
    """An actor's description of itself.

    Attributes:
        pid: Process id.
        node: Ray's id of its node.
        address: Address at which others reach its node.
        printed: The files that receive its output.
    """

    pid: int
    node: str
    address: str
    printed: list[Printed]


QUESTIONS = "questions"
"""Concurrency group for requests other than calls, with its own thread and event loop."""


class RoleActor:
    """Runs one role's object. Calls sent together begin together, in order."""

    def __init__(self, role: str, incarnation: int, mark: str, log: str | None, umask: int) -> None:
        """Redirect output and start the guard; the object is made later.

        Args:
            role: Name of the role, such as engine[0].
            incarnation: Number of the incarnation.
            mark: Mark of its descendants; see `rl_core.cluster.processes.guard`.
            log: File on its node for its output; None leaves output to Ray.
            umask: The caller's umask, so that files get the caller's permissions.
        """
        self._name, self._mark = role, mark
        self._role = ServedRole()
        self._frames: dict[int, list[asyncio.Task[Packed]]] = {}
        self._num_answered: Counter[int] = Counter()
        self._num_begun = 0
        self._moved = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        register_dump(mark)
        os.umask(umask)
        if log is not None:
            print_into(Path(log))
        self._printed = printed_files()
        if log is not None:
            sys.stderr.write(log_header(role, incarnation))
        if sys.platform == "linux":
            start_guard(self._family(), [os.getpid(), os.getppid()])  # the parent is the node's own process

    def __repr__(self) -> str:
        """Return the prefix that Ray prints before the actor's lines."""
        return self._name

    async def hello(self) -> Wire:
        """Return the actor's `ActorHello`, packed as an answer."""
        self._loop = asyncio.get_running_loop()
        node = ray.get_runtime_context().get_node_id()
        util: Any = ray.util
        hello = ActorHello(os.getpid(), node, util.get_node_ip_address(), self._printed)
        return to_wire(pack((True, hello)))

    async def run(self, frame: int, index: int, *calls: Wire) -> Wire:
        """Answer one call of a frame; the first call carries the whole frame.

        Raises:
            RuntimeError: The frame was lost in transit.
        """
        async with self._moved:
            if index == 0:
                await self._moved.wait_for(lambda: self._num_begun == frame)
                self._begin(frame, calls)
            else:
                await self._moved.wait_for(lambda: self._num_begun > frame)
        if frame not in self._frames:
            raise RuntimeError("the calls sent together with this one were lost in transit.")
        answer = await self._frames[frame][index]
        self._num_answered[frame] += 1
        if self._num_answered[frame] == len(self._frames[frame]):
            del self._frames[frame], self._num_answered[frame]
        return to_wire(answer)

    async def skip(self, frame: int) -> None:
        """Skip a lost frame, so that later frames do not wait for it."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._num_begun >= frame)
            if self._num_begun == frame:
                self._begin(frame, ())

    @ray.method(concurrency_group=QUESTIONS)
    async def stacks(self) -> Wire:
        """Return this process's stacks, packed as an answer; works even if the event loop of its calls is blocked."""
        return to_wire(pack((True, process_stacks(self._loop))))

    async def lives(self) -> None:
        """Never return; the call's failure notifies the caller of a death."""
        await asyncio.Event().wait()

    async def end(self) -> None:
        """Close the object, and end processes that it started."""
        try:
            await self._role.close()
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        await asyncio.to_thread(end_family, self._family())

    def _family(self) -> ProcessFamily:
        leads = os.getpgid(0) == os.getpid()  # Ray's workers do
        return ProcessFamily(self._mark, os.getpid() if leads else 0)

    def _begin(self, frame: int, calls: Sequence[Wire]) -> None:
        if calls:
            self._frames[frame] = [asyncio.ensure_future(self._role.answer(Packed(*call))) for call in calls]
        self._num_begun += 1
        self._moved.notify_all()


def to_wire(packed: Packed) -> Wire:
    """Convert a packed value for Ray."""
    return packed.body, [np.frombuffer(buffer, dtype=np.uint8) for buffer in packed.buffers]


def print_into(path: Path) -> None:
    """Redirect this process's output to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with path.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def printed_files() -> list[Printed]:
    """Return the files that receive this process's output, with their current sizes."""
    found: dict[str, Printed] = {}
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.is_file():
                stat = path.stat()
                found[str(path)] = Printed(str(path), stat.st_ino, stat.st_size)
    return list(found.values())


def is_seen_here(printed: Sequence[Printed]) -> bool:
    """Return True if these files are visible on this host."""
    with contextlib.suppress(OSError):
        return all(Path(file.path).stat().st_ino == file.inode for file in printed)
    return False


def read_printed(printed: Sequence[Printed]) -> str:
    """Return the last lines of each file."""
    return "\n".join(read_tail(Path(file.path), file.start) for file in printed)
