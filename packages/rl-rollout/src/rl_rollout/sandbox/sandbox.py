"""Runs untrusted programs, each in its own processes with limits."""

import asyncio
import contextlib
import functools
import math
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import RoleError, SettingsError
from rl_core.files import make_locked_folder, remove_unlocked_folders
from rl_rollout.sandbox.launching import Output, Serve, launch, library_path
from rl_rollout.sandbox.options import GUARANTEES, Level, ProgramRun, SandboxLimits, SandboxOptions
from rl_rollout.sandbox.system_calls import system_call_filter

log = structlog.get_logger(__name__)

FIRST_UID, NUM_UIDS, NOBODY = 61184, 4096, 65534
"""User ids of programs, which own their folders."""
FOLDER_PREFIX = "rl-sandbox-"
PROGRAM = "program.py"
KEPT_BYTES = 1 << 16
"""Size of a command's output that is kept, for each stream."""
POLL_S = 0.025
COMMAND_POLL_S = 0.25
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/nix")
NETWORK_PATHS = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates", "/etc/pki")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Any program, with a folder that it can write to.

    Attributes:
        arguments: The program, which is found on the environment's PATH, and its arguments.
        folder: Absolute path, the same inside the sandbox. If the sandbox runs as another user, that user becomes the
            owner of the folder and its contents.
        cwd: Working directory, inside `folder`.
        environment: All environment variables of the command.
        stdin: Its standard input.
        port: Port of 127.0.0.1 that answers, with network = "gateway".
        serve: Answers requests on that port.
    """

    arguments: tuple[str, ...]
    folder: str
    cwd: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    stdin: bytes = b""
    port: int = 0
    serve: Serve | None = None


class Sandbox:
    """Runs programs at the strongest level of isolation that the machine permits, which it finds at its start.

    GUARANTEES lists the levels, strongest first. `docs/guides/rewards.md` explains what each level stops and what it
    does not.
    """

    def __init__(self, options: SandboxOptions | None = None) -> None:
        """Store the options. Nothing runs yet.

        Raises:
            SettingsError: This is not Linux.
        """
        self._options = options or SandboxOptions()
        if sys.platform != "linux":
            raise SettingsError(f"the sandbox for code needs Linux; found {sys.platform}. Run in a Linux container.")
        self._level: Level | None = None

    @property
    def level(self) -> Level | None:
        """The level of isolation; None before `start`."""
        return self._level

    async def start(self) -> Level:
        """Return the first level that works, strongest first. Levels are tried only once.

        Raises:
            SettingsError: No level that the options permit works. The message gives the reason for each.
        """
        if self._level is not None:
            return self._level
        refusals = []
        if self._options.isolation == "none":
            self._level = "unconfined"
            return self._level
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
        """Run one Python program until it ends or hits a limit.

        Args:
            program: Source of the program.
            stdin: Its standard input.
            files: Text of more files in its working folder, by name.
            wall_s: Maximum seconds, if fewer than in the limits.

        Raises:
            RoleError: The sandbox itself failed. A program cannot cause this.
            SettingsError: No sandbox works here.
        """
        level = await self.start()
        limits = replace(self._options.limits, wall_s=min(self._options.limits.wall_s, wall_s))
        return await self._run(level, {**(files or {}), PROGRAM: program}, limits, stdin)

    async def _try(self, level: Level) -> str | None:
        """Return None if a trial program runs at this level with the right network access, else the reason."""
        word = secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            probe = PROBE.format(word=word, port=listening.getsockname()[1])
            try:
                run = await self._run(level, {PROGRAM: probe}, self._options.limits, b"")
            except RoleError as error:
                return str(error)
        expected = f"{word} {'open' if self._options.network == 'allow' else 'closed'}"
        if run.is_success and run.stdout.decode().strip() == expected:
            return None
        errors = run.stderr.decode(errors="replace").strip()[:300]
        return (
            f"the trial program {run.ended} with exit code {run.exit_code}, and printed {run.stdout!r} and {errors!r}"
        )

    async def run_command(self, command: Command) -> ProgramRun:
        """Run a command until it ends or hits a limit. The end of its output is kept.

        Raises:
            RoleError: The command cannot be started, or the sandbox itself failed. A program cannot cause this.
            SettingsError: No sandbox works here.
        """
        level, limits = await self.start(), self._options.limits
        uid = _user_of(level)
        if uid is not None:
            await asyncio.to_thread(_give_to, uid, command.folder)
        spec = {"command": command.arguments, "environment": dict(command.environment), "port": command.port}
        spec |= {"cwd": command.cwd, "work": command.folder, "poll_s": COMMAND_POLL_S}
        stdout = Output(kept_bytes=KEPT_BYTES, max_bytes=limits.stdout_bytes, keeps_end=True)
        outputs = stdout, Output(kept_bytes=KEPT_BYTES, keeps_end=True)
        with sandbox_folder(uid) as folder:
            whole = self._specification(level, uid, folder) | spec | {"files": {}, "limits": asdict(limits)}
            return await launch(whole, command.stdin, limits, outputs=outputs, serve=command.serve)

    async def _run(self, level: Level, files: dict[str, str], limits: SandboxLimits, stdin: bytes) -> ProgramRun:
        uid = _user_of(level)
        stdout = Output(kept_bytes=limits.stdout_bytes + 1, max_bytes=limits.stdout_bytes)
        outputs = stdout, Output(kept_bytes=limits.stderr_bytes)
        with sandbox_folder(uid) as folder:
            spec = self._specification(level, uid, folder)
            spec |= {"files": files, "limits": asdict(limits)}
            return await launch(spec, stdin, limits, outputs=outputs, serve=None)

    def _specification(self, level: Level, uid: int | None, folder: str) -> dict[str, Any]:
        options = self._options
        paths = (*SYSTEM_PATHS, *(NETWORK_PATHS if options.network == "allow" else ()), *options.readable)
        calls = system_call_filter(network=options.network, allows_signals=level != "same_user")
        return {
            "level": level,
            "uid": uid,
            "folder": folder,
            "cwd": "",
            "work": "",
            "command": [options.python or sys.executable, "-I", "-B", "-X", "utf8", PROGRAM],
            "environment": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **library_path()},
            "readable": _readable([*paths, sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)]),
            "network": options.network,
            "port": 0,
            "poll_s": POLL_S,
            "system_calls": calls.hex(),
        }


PROBE = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 5)
    print("{word} open")
except OSError:
    print("{word} closed")
"""


def _levels(options: SandboxOptions) -> list[Level]:
    """Return the levels to try, strongest first."""
    levels: list[Level] = ["user_namespaces"]
    if os.geteuid() == 0:
        levels = ["namespaces", "user_namespaces", "other_user"]
    if options.network == "gateway":  # a network of its own
        return [level for level in levels if level != "other_user"]
    return [*levels, "same_user"] if options.isolation == "any" else levels


def _user_of(level: Level) -> int | None:
    """Return the user id that a program gets; None if it stays this user."""
    return _free_uid() if os.geteuid() == 0 and level not in ("same_user", "unconfined") else None


def _give_to(uid: int, folder: str) -> None:
    """Change the owner of a folder and everything in it, without following links."""
    os.chown(folder, uid, uid)
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(Path(path, name), uid, uid, follow_symlinks=False)


def _free_uid() -> int:
    """Return an unused user id, random for each program, so that its processes can be counted and killed by it."""
    mapped = Path("/proc/self/uid_map").read_text().split()
    has_range = len(mapped) == 3 and int(mapped[2]) >= FIRST_UID + NUM_UIDS
    return FIRST_UID + random.randrange(NUM_UIDS) if has_range else NOBODY  # noqa: S311 (no secret)


def _readable(paths: Iterable[str]) -> list[str]:
    """Return the paths that exist and the targets of links, without paths inside others."""
    wanted: list[str] = []
    for path in paths:
        wanted += [path, *([str(Path(path).resolve())] if Path(path).is_symlink() else [])]
    found: list[str] = []
    for path in sorted({str(Path(path).absolute()) for path in wanted if Path(path).exists()}):
        if not any(Path(path).is_relative_to(other) and not Path(other).is_symlink() for other in found):
            found.append(path)
    return found


@contextlib.contextmanager
def sandbox_folder(uid: int | None) -> Iterator[str]:
    """Make a temporary folder of a user, and remove it afterwards.

    It is locked while this process lives, so that a later process can remove a stale one.
    """
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    path, lock = make_locked_folder(parent, FOLDER_PREFIX, mode=0o700)
    folder = str(path)
    try:
        if uid is not None:
            os.chown(folder, uid, uid)
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _remove(folder: str) -> None:
    """Remove a folder, whatever a program left in it."""
    with contextlib.suppress(RecursionError):  # deeply nested folders
        shutil.rmtree(folder, ignore_errors=True)
    if Path(folder).exists():  # for example read-only folders of package managers
        subprocess.run(["/bin/chmod", "-R", "u+rwX", folder], check=False, stderr=subprocess.DEVNULL)  # noqa: S603
        subprocess.run(["/bin/rm", "-rf", folder], check=False)  # noqa: S603 (our own folder)


@functools.cache
def _sweep(parent: Path) -> None:
    """Remove the folders of killed processes, once per process."""
    others = (*range(FIRST_UID, FIRST_UID + NUM_UIDS), NOBODY) if os.geteuid() == 0 else ()
    remove_unlocked_folders(parent.glob(f"{FOLDER_PREFIX}*"), also_of=others)
