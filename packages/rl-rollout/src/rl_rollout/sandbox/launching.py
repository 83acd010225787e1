"""Starts the launcher of a sandbox, reads its program's output up to a limit, and cleans up."""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import structlog

from rl_core.errors import RoleError
from rl_rollout.sandbox.options import ProgramRun, SandboxLimits

log = structlog.get_logger(__name__)

LAUNCHER = Path(__file__).with_name("launcher.py")
GRACE_S = 10.0

Serve = Callable[[socket.socket], AbstractAsyncContextManager[None]]
"""Answers on a listening socket while the context is entered."""


@dataclass(slots=True, kw_only=True)
class Output:
    """Output of a program on one stream, up to a limit.

    Attributes:
        kept_bytes: Maximum size that is kept.
        max_bytes: Size at which the program is ended; None sets no limit.
        keeps_end: True keeps the end, False the beginning.
        kept: The kept output.
        is_over: True if the program printed more than max_bytes.
    """

    kept_bytes: int
    max_bytes: int | None = None
    keeps_end: bool = False
    kept: bytearray = field(default_factory=bytearray)
    is_over: bool = False

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until the stream ends or exceeds max_bytes."""
        num_bytes = 0
        while piece := await stream.read(1 << 16):
            num_bytes += len(piece)
            self.kept += piece if self.keeps_end else piece[: self.kept_bytes - len(self.kept)]
            del self.kept[: max(len(self.kept) - self.kept_bytes, 0)]
            if self.max_bytes is not None and num_bytes > self.max_bytes:
                self.is_over = True
                return


async def launch(
    spec: Mapping[str, Any], stdin: bytes, limits: SandboxLimits, *, outputs: tuple[Output, Output], serve: Serve | None
) -> ProgramRun:
    """Start the launcher, send its input, read the outputs up to their limits, and clean up.

    Args:
        spec: Specification for the launcher.
        stdin: Standard input of the program.
        limits: Limits of the program.
        outputs: Standard output and standard error of the program.
        serve: Answers on the one port of the program's own network.

    Raises:
        RoleError: The program could not be started, or the sandbox itself failed.
    """
    text = json.dumps(spec).encode()
    status_read, status_write = os.pipe()
    os.set_blocking(status_read, False)
    ours, theirs = socket.socketpair()
    try:
        transport, process = await _start_launcher(status_write, theirs)
        serving = None if serve is None else asyncio.create_task(_serve_inside(ours, serve))
        try:
            await _exchange(process, len(text).to_bytes(8, "little") + text + stdin, limits, outputs)
        finally:
            await asyncio.shield(_end(transport, process))
            if serving is not None and not serving.done():
                serving.cancel()
        stdout, stderr = (bytes(output.kept) for output in outputs)
        if outputs[0].is_over:
            return ProgramRun(ended="output", stdout=stdout, stderr=stderr)
        run = _read_report(status_read, stdout, stderr)
        if serving is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        return run
    finally:
        os.close(status_read)
        ours.close()


async def _serve_inside(ours: socket.socket, serve: Serve) -> None:
    """Receive the listening socket from the program's network, and serve on it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(ours, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(ours)
    _, handles, _, _ = socket.recv_fds(ours, 1, 1)
    if not handles:
        raise RoleError("the sandbox's launcher ended before its network was set up.")
    async with serve(socket.socket(fileno=handles[0])):
        await asyncio.Event().wait()


async def _start_launcher(
    status_write: int, theirs: socket.socket
) -> tuple[asyncio.SubprocessTransport, asyncio.subprocess.Process]:
    """Do as asyncio.create_subprocess_exec, but also return the transport, which is needed to close pipes."""
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=1 << 16, loop=loop),
            *(sys.executable, "-I", "-S", "-B", str(LAUNCHER), str(status_write), str(theirs.fileno())),
            pass_fds=(status_write, theirs.fileno()),
            start_new_session=True,
            env=library_path(),
            cwd="/",
        )
    except OSError as error:
        raise RoleError(f"the sandbox's launcher cannot start: {error}.") from error
    finally:
        os.close(status_write)
        theirs.close()
    return transport, asyncio.subprocess.Process(transport, protocol, loop)


async def _exchange(
    process: asyncio.subprocess.Process, given: bytes, limits: SandboxLimits, outputs: tuple[Output, Output]
) -> None:
    """Send the input, and read outputs until the program ends or prints too much."""
    streams = (process.stdin, process.stdout, process.stderr)
    stdin, stdout, stderr = cast(tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader], streams)
    feeding = asyncio.create_task(_feed(stdin, given))
    errors = asyncio.create_task(outputs[1].read(stderr))
    try:
        async with asyncio.timeout(limits.wall_s + GRACE_S):
            await outputs[0].read(stdout)
            if not outputs[0].is_over:
                await errors
                await process.wait()
    except TimeoutError as error:
        raise RoleError(
            f"a sandbox did not end within {GRACE_S:g} s after its limit of {limits.wall_s:g} s."
        ) from error
    finally:
        feeding.cancel()
        errors.cancel()


async def _feed(stream: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program may ignore its input
        stream.write(given)
        await stream.drain()
        stream.close()
        await stream.wait_closed()


async def _end(transport: asyncio.SubprocessTransport, process: asyncio.subprocess.Process) -> None:
    """End the launcher and everything that it started, and close its pipes."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    for stream in range(3):
        pipe = transport.get_pipe_transport(stream)
        if pipe is not None:
            pipe.close()
    try:
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    except TimeoutError:
        log.warning("sandbox_killed", pid=process.pid)
    transport.close()  # kills it if it still runs
    await process.wait()


def _read_report(status_read: int, stdout: bytes, stderr: bytes) -> ProgramRun:
    lines: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        lines = os.read(status_read, 1 << 16).splitlines()
    found: dict[str, Any] = json.loads(lines[0]) if lines else {}
    if "error" in found:
        raise RoleError(f"the program could not be started: {found['error']}.")
    if not found:
        said = stderr.decode(errors="replace").strip()[:500]
        raise RoleError(f"the sandbox's launcher ended without a report; it printed {said!r}.")
    if found["ended"] == "cancelled":
        raise RoleError("a sandbox was ended by a signal from outside.")
    return ProgramRun(stdout=stdout, stderr=stderr, **found)


def library_path() -> dict[str, str]:
    """Return this Python's library path, if the environment sets it."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if name in os.environ else {}
