"""Options and limits of a sandbox, and the outcome of a program."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from rl_core.record_fields import PositiveInt, settings_record

GUARANTEES = {
    "namespaces": "another user in its own namespaces: sees only Python's and the system's files, and no other process",
    "user_namespaces": "in its own namespaces: sees only Python's and the system's files, and no other process",
    "other_user": "another user: reads what all users may read, and sees this user's processes but cannot reach them",
    "same_user": "this user: reads and writes all that this user may; has limits, no network and no signals",
    "unconfined": "this user, with all rights of this user; only the time is limited, and no process outlives it",
}

Level = Literal["namespaces", "user_namespaces", "other_user", "same_user", "unconfined"]
Ended = Literal["exited", "wall_time", "memory", "processes", "output"]


@settings_record
class SandboxLimits:
    """Limits of one program.

    Attributes:
        wall_s: Maximum seconds until everything is killed.
        cpu_s: Maximum processor seconds of each process, rounded to whole seconds.
        memory_bytes: Maximum address space of each process, and maximum resident memory of all processes together.
        processes: Maximum number of concurrent processes and threads.
        file_bytes: Maximum size of a file; with namespaces, of all files together.
        open_files: Maximum number of open file descriptors of each process.
        stdout_bytes: Maximum size of its output; a program that prints more is killed.
        stderr_bytes: Size of its errors that is kept; the rest is dropped.
    """

    wall_s: Annotated[float, Gt(0)] = 10.0
    cpu_s: Annotated[float, Ge(1)] = 10.0
    memory_bytes: Annotated[int, Ge(1 << 26)] = 1 << 29
    processes: PositiveInt = 16
    file_bytes: Annotated[int, Ge(1 << 12)] = 1 << 24
    open_files: Annotated[int, Ge(8)] = 64
    stdout_bytes: PositiveInt = 1 << 20
    stderr_bytes: PositiveInt = 1 << 14


@settings_record
class SandboxOptions:
    """Options of a sandbox.

    Attributes:
        limits: Limits of one program.
        network: "deny" allows no socket. "allow" gives programs this machine's network. "gateway" gives them a network
            of their own, in which only one port of a `Command` answers.
        isolation: "strong" refuses to run where programs would have this user's rights. "any" warns and runs there.
            "none" isolates nothing: programs are only watched, and killed at the end.
        python: Path of the interpreter that runs programs; empty uses this process's.
        readable: Files and folders that programs may read in addition to Python's and the system's. The level's user
            must be able to read them.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    network: Literal["deny", "allow", "gateway"] = "deny"
    isolation: Literal["strong", "any", "none"] = "strong"
    python: str = ""
    readable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """Outcome of a program.

    Attributes:
        ended: "exited" if it ended by itself, by a signal, or at a limit on processor time or address space; otherwise
            the limit that ended it.
        exit_code: Exit code, as in subprocess: negative for a signal. None if a limit ended it.
        stdout: Its standard output; the end of a command's.
        stderr: Its standard error, up to a size: the beginning, or the end of a command's.
    """

    ended: Ended
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def is_success(self) -> bool:
        """True if it ended by itself with exit code 0."""
        return self.ended == "exited" and self.exit_code == 0
