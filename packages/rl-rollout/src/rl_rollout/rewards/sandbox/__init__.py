"""Runs Python programs that nobody trusts, each in processes of its own under limits."""

import asyncio
import contextlib
import json
import math
import os
import random
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import structlog

from rl_core.errors import RoleError, SettingsError
from rl_rollout.rewards.outputs import cut
from rl_rollout.rewards.sandbox.folder import FIRST_UID, NOBODY, NUM_UIDS, sandbox_folder
from rl_rollout.rewards.sandbox.system_calls import system_call_filter

log = structlog.get_logger(__name__)

LAUNCHER = Path(__file__).with_name("launcher.py")
PROGRAM = "program.py"
GRACE_S = 10.0
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/nix")
NETWORK_PATHS = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates", "/etc/pki")
GUARANTEES = {
    "namespaces": "another user, in namespaces of its own: sees no file but Python and the system's, and no process",
    "user_namespaces": "in namespaces of its own: sees no file but Python and the system's, and no process",
    "other_user": "another user: reads what all users may read, sees processes, and reaches none of this user's",
    "same_user": "this user: reads and writes all that this user may; only limits, no network and no signals",
}

Level = Literal["namespaces", "user_namespaces", "other_user", "same_user"]
Ended = Literal["exited", "wall_time", "memory", "processes", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one program may take.

    Attributes:
        wall_s: Seconds until everything is killed.
        cpu_s: Processor seconds of each process, rounded to whole ones.
        memory_bytes: Address space of each process, and resident memory of all together.
        processes: Processes and threads at once.
        file_bytes: Size of a file; with namespaces, of all files together.
        open_files: File descriptors of each process.
        stdout_bytes: What it may print; a program that prints more is killed.
        stderr_bytes: What is kept of its errors; more is dropped.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 1 << 29
    processes: int = 16
    file_bytes: int = 1 << 24
    open_files: int = 64
    stdout_bytes: int = 1 << 20
    stderr_bytes: int = 1 << 14

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            SettingsError: A limit is not above 0, or too small for Python to start.
        """
        least = {"memory_bytes": 1 << 26, "open_files": 8, "file_bytes": 1 << 12, "cpu_s": 1.0}
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least.get(name, 1e-3):
                raise SettingsError(
                    f"sandbox limit {name} must be at least {least.get(name, 'above 0')}; found {value!r}."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """How programs are kept in.

    Attributes:
        limits: What one program may take.
        network: "deny" lets it open no socket; "allow" gives it this machine's network.
        isolation: "strong" refuses to run where programs would have this user's rights; "any" warns and runs there.
        python: Path of the interpreter that runs programs; empty is this process's.
        readable: More files and folders that it may read (and that the level's user can), beside Python's and
            the system's.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    network: Literal["deny", "allow"] = "deny"
    isolation: Literal["strong", "any"] = "strong"
    python: str = ""
    readable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """What became of a program.

    Attributes:
        ended: "exited" by itself (or by a signal, a CPU or address space limit), or which limit ended it.
        exit_code: As of subprocess: negative for a signal, None when a limit ended it.
        stdout: What it printed.
        stderr: What it printed there, its end dropped where it is long.
        wall_s: Seconds that it ran.
        cpu_s: Processor seconds of all its processes that ended by themselves or were waited for.
        peak_bytes: Largest resident memory that was seen.
    """

    ended: Ended
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0

    @property
    def is_success(self) -> bool:
        """True when it ended by itself with exit code 0."""
        return self.ended == "exited" and self.exit_code == 0


class Sandbox:
    """Runs programs; finds at its start the strongest level of isolation that the machine permits.

    Levels, strongest first: see GUARANTEES. `docs/guides/rewards.md` says what each stops, and what not.
    """

    def __init__(self, options: SandboxOptions | None = None) -> None:
        """Check the options; nothing runs yet.

        Raises:
            SettingsError: An option is impossible, or this is not Linux.
        """
        self._options = options or SandboxOptions()
        self._options.limits.check()
        for name, known in (("network", ("deny", "allow")), ("isolation", ("strong", "any"))):
            if getattr(self._options, name) not in known:
                raise SettingsError(f"sandbox {name} must be one of {known}; found {getattr(self._options, name)!r}.")
        if sys.platform != "linux":
            raise SettingsError(f"the sandbox for code needs Linux; found {sys.platform}. Run in a Linux container.")
        self._level: Level | None = None

    @property
    def level(self) -> Level | None:
        """The level of isolation; None before `start`."""
        return self._level

    async def start(self) -> Level:
        """Try the levels, strongest first, and keep the first that works; once.

        Raises:
            SettingsError: None works that the options permit; has what each said.
        """
        if self._level is not None:
            return self._level
        refusals = []
        for level in _levels(self._options):
            if (refusal := await self._try(level)) is None:
                self._level = level
                event = log.warning if level == "same_user" else log.info
                event("sandbox_chosen", level=level, guarantee=GUARANTEES[level], network=self._options.network)
                return level
            refusals.append(f"{level}: {refusal}")
        advice = "" if self._options.isolation == "any" else ' isolation = "any" would run code with your rights.'
        raise SettingsError(
            "no sandbox for code works here. Allow user namespaces, or run as root in a container."
            f"{advice} Tried:\n" + "\n".join(refusals)
        )

    async def run(
        self, program: str, *, stdin: bytes = b"", files: Mapping[str, str] | None = None, wall_s: float = math.inf
    ) -> ProgramRun:
        """Run one Python program to its end, or to a limit.

        Args:
            program: Its source.
            stdin: What it can read.
            files: More files in its working folder, by name.
            wall_s: Seconds, where fewer than the limits give.

        Raises:
            RoleError: The sandbox itself failed; never the program's doing.
            SettingsError: No sandbox works here.
        """
        level = await self.start()
        limits = replace(self._options.limits, wall_s=min(self._options.limits.wall_s, wall_s))
        return await self._run(level, {**(files or {}), PROGRAM: program}, limits, stdin)

    async def _try(self, level: Level) -> str | None:
        """None when a program runs at this level, and can open no socket where it must not; else what happened."""
        word = secrets.token_hex(8)
        try:
            run = await self._run(level, {PROGRAM: PROBE.format(word=word)}, self._options.limits, b"")
        except RoleError as error:
            return str(error)
        expected = f"{word} {'open' if self._options.network == 'allow' else 'closed'}"
        if run.is_success and run.stdout.decode().strip() == expected:
            return None
        errors = cut(run.stderr.decode(errors="replace").strip(), max_characters=300)
        return f"the trial program {run.ended} with exit code {run.exit_code}, said {run.stdout!r} and {errors!r}"

    async def _run(self, level: Level, files: dict[str, str], limits: SandboxLimits, stdin: bytes) -> ProgramRun:
        uid = _free_uid() if os.geteuid() == 0 and level != "same_user" else None
        with sandbox_folder(uid) as folder:
            spec = self._specification(level, uid, folder)
            spec |= {"files": files, "limits": asdict(limits)}
            text = json.dumps(spec).encode()
            return await _launch(len(text).to_bytes(8, "little") + text + stdin, limits)

    def _specification(self, level: Level, uid: int | None, folder: str) -> dict[str, Any]:
        options = self._options
        paths = (*SYSTEM_PATHS, *(NETWORK_PATHS if options.network == "allow" else ()), *options.readable)
        calls = system_call_filter(allows_network=options.network == "allow", allows_signals=level != "same_user")
        return {
            "level": level,
            "uid": uid,
            "folder": folder,
            "command": [options.python or sys.executable, "-I", "-B", "-X", "utf8", PROGRAM],
            "environment": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **_library_path()},
            "readable": _readable([*paths, sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)]),
            "network": options.network,
            "system_calls": calls.hex(),
        }


PROBE = """
import socket
try:
    socket.socket()
    print("{word} open")
except OSError:
    print("{word} closed")
"""


async def _launch(given: bytes, limits: SandboxLimits) -> ProgramRun:
    """Start the launcher, feed it, read what comes within bounds, and leave nothing behind."""
    status_read, status_write = os.pipe()
    os.set_blocking(status_read, False)
    started_at = time.monotonic()
    try:
        transport, process = await _start_launcher(status_write)
        try:
            stdout, stderr = await _exchange(process, given, limits)
        finally:
            await asyncio.shield(_end(transport, process))
        if len(stdout) > limits.stdout_bytes:
            return ProgramRun(ended="output", stdout=stdout, stderr=stderr, wall_s=time.monotonic() - started_at)
        return _read_report(status_read, stdout, stderr)
    finally:
        os.close(status_read)


async def _start_launcher(status_write: int) -> tuple[asyncio.SubprocessTransport, asyncio.subprocess.Process]:
    """As asyncio.create_subprocess_exec, which keeps the transport to itself: pipes could not be closed."""
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=1 << 16, loop=loop),
            *(sys.executable, "-I", "-S", "-B", str(LAUNCHER), str(status_write)),
            pass_fds=(status_write,),
            start_new_session=True,
            env=_library_path(),
            cwd="/",
        )
    except OSError as error:
        raise RoleError(f"the sandbox's launcher cannot start: {error}.") from error
    finally:
        os.close(status_write)
    return transport, asyncio.subprocess.Process(transport, protocol, loop)


async def _exchange(process: asyncio.subprocess.Process, given: bytes, limits: SandboxLimits) -> tuple[bytes, bytes]:
    """What the program printed, as soon as it ended or printed too much."""
    streams = (process.stdin, process.stdout, process.stderr)
    stdin, stdout, stderr = cast(tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader], streams)
    feeding = asyncio.create_task(_feed(stdin, given))
    errors = asyncio.create_task(_read(stderr, limits.stderr_bytes, drop_rest=True))
    try:
        async with asyncio.timeout(limits.wall_s + GRACE_S):
            printed = await _read(stdout, limits.stdout_bytes + 1, drop_rest=False)
            if len(printed) > limits.stdout_bytes:
                return printed, b""
            said = await errors
            await process.wait()
            return printed, said
    except TimeoutError as error:
        raise RoleError(f"a sandbox did not end {GRACE_S:g} s after its {limits.wall_s:g} s were over.") from error
    finally:
        feeding.cancel()
        errors.cancel()


async def _feed(stream: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read its input
        stream.write(given)
        await stream.drain()
        stream.close()
        await stream.wait_closed()


async def _read(stream: asyncio.StreamReader, max_bytes: int, *, drop_rest: bool) -> bytes:
    """What comes until the stream ends, or until there are max_bytes."""
    received = bytearray()
    while piece := await stream.read(1 << 16):
        received += piece[: max_bytes - len(received)]
        if len(received) >= max_bytes and not drop_rest:
            break
    return bytes(received)


async def _end(transport: asyncio.SubprocessTransport, process: asyncio.subprocess.Process) -> None:
    """End the launcher if it runs, and with it everything that it started; close its pipes."""
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
    transport.close()  # kills what still runs
    await process.wait()


def _read_report(status_read: int, stdout: bytes, stderr: bytes) -> ProgramRun:
    lines: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        lines = os.read(status_read, 1 << 16).splitlines()
    found: dict[str, Any] = json.loads(lines[0]) if lines else {}
    if "error" in found:
        raise RoleError(f"the sandbox could not be made: {found['error']}.")
    if not found:
        said = cut(stderr.decode(errors="replace").strip(), max_characters=500)
        raise RoleError(f"the sandbox's launcher ended without a report; it said {said!r}.")
    if found["ended"] == "cancelled":
        raise RoleError("a sandbox was ended by a signal from outside.")
    return ProgramRun(stdout=stdout, stderr=stderr, **found)


def _levels(options: SandboxOptions) -> list[Level]:
    """Levels to try, strongest first."""
    levels: list[Level] = ["user_namespaces"]
    if os.geteuid() == 0:
        levels = ["namespaces", "user_namespaces", "other_user"]
    return [*levels, "same_user"] if options.isolation == "any" else levels


def _free_uid() -> int:
    """A user that is no one's, another for each program: its processes are counted and killed by it."""
    mapped = Path("/proc/self/uid_map").read_text().split()
    has_range = len(mapped) == 3 and int(mapped[2]) >= FIRST_UID + NUM_UIDS
    return FIRST_UID + random.randrange(NUM_UIDS) if has_range else NOBODY  # noqa: S311 (no secret)


def _readable(paths: Iterable[str]) -> list[str]:
    """Paths that exist, targets of links too, none inside another."""
    wanted: list[str] = []
    for path in paths:
        wanted += [path, *([str(Path(path).resolve())] if Path(path).is_symlink() else [])]
    found: list[str] = []
    for path in sorted({str(Path(path).absolute()) for path in wanted if Path(path).exists()}):
        if not any(Path(path).is_relative_to(other) and not Path(other).is_symlink() for other in found):
            found.append(path)
    return found


def _library_path() -> dict[str, str]:
    """Where this Python finds its libraries, if that was said by the environment."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if name in os.environ else {}
