"""Limits of a sandbox, and the outcome of its program."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from rl_core.errors import SettingsError

GUARANTEES = {
    "namespaces": "another user, in namespaces of its own: sees no file but Python and the system's, and no process",
    "user_namespaces": "in namespaces of its own: sees no file but Python and the system's, and no process",
    "other_user": "another user: reads what all users may read, sees processes, and reaches none of this user's",
    "same_user": "this user: reads and writes all that this user may; only limits, no network and no signals",
    "unconfined": "this user, with all that this user may do; only the time is limited, and nothing outlives it",
}

Level = Literal["namespaces", "user_namespaces", "other_user", "same_user", "unconfined"]
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
        network: "deny" lets it open no socket; "allow" gives it this machine's network; "gateway" a network of its own,
            in which one port of a `Command` answers, and nothing else is.
        isolation: "strong" refuses to run where programs would have this user's rights; "any" warns and runs there;
            "none" keeps nothing from them: they are watched, and all of them ended.
        python: Path of the interpreter that runs programs; empty is this process's.
        readable: More files and folders that it may read (and that the level's user can), beside Python's and
            the system's.
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
        ended: "exited" by itself (or by a signal, a CPU or address space limit), or which limit ended it.
        exit_code: As of subprocess: negative for a signal, None when a limit ended it.
        stdout: What it printed; of a command the end.
        stderr: What it printed there; where it is long, the beginning, and of a command the end.
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
