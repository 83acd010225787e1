"""Faults drawn from a seed: processes that are killed or stopped temporarily, a full disk, a clock that jumps.

Without permission to mount, no disk is filled.
"""

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos_clock import OFFSET_S, VARIABLE

KINDS = ("kill", "kill", "stop", "stop", "clock", "disk")
"""Kinds of faults; a repeated kind is drawn more often."""
LONGEST_S = 1.0
"""Maximum seconds for which a process is stopped or a disk is full."""
LONGEST_JUMP_S = 100_000
SITE = Path(__file__).with_name("chaos_site")


class Clock:
    """The wall clock of processes that start with `environment` (see `chaos_clock`)."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(OFFSET_S.pack(0))
        self._file = file

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for these processes."""
        path = [str(SITE), str(SITE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(path)}

    def set(self, offset_s: int) -> None:
        """Set the offset from the true time."""
        with self._file.open("r+b") as file:
            file.write(OFFSET_S.pack(offset_s))


class Disk:
    """A small memory disk that can be filled on demand."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._ballast = place / ".ballast"

    def fill(self) -> None:
        """Fill every block, including those that a process frees meanwhile."""
        with self._ballast.open("ab") as file:
            for _ in range(3):
                free = os.statvfs(self.place)
                with suppress(OSError):  # others write meanwhile
                    if free.f_bavail:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free.f_bavail * free.f_bsize)

    def free(self) -> None:
        """Free the blocks."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(place: Path, *, size_mib: int) -> Iterator[Disk | None]:
    """Yield a disk mounted at a new folder; None without permission to mount."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", str(place)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield Disk(place) if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@dataclass(slots=True)
class Chaos:
    """Makes faults, ends lasting ones, and counts them.

    Attributes:
        seed: Seed of all draws.
        clock: Clock of the processes.
        disk: Disk of the processes; None if it cannot be filled.
        faults: Kind and victim of each fault so far.
    """

    seed: int
    clock: Clock
    disk: Disk | None
    faults: list[tuple[str, str]] = field(default_factory=list)
    draw: random.Random = field(init=False)
    _lasting: list[threading.Timer] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    @property
    def counts(self) -> dict[str, int]:
        """Faults by kind and victim."""
        return dict(sorted(Counter(" ".join(fault).strip() for fault in self.faults).items()))

    def draw_kind(self) -> str:
        """Draw the next fault's kind, among those that work on this machine."""
        return self.draw.choice([kind for kind in KINDS if kind != "disk" or self.disk is not None])

    def make(self, kind: str, pid: int = 0, victim: str = "") -> bool:
        """Make a fault; return False if the process had ended."""
        lasts_s = self.draw.uniform(0.0, LONGEST_S)
        match kind:
            case "clock":
                self.clock.set(round(self.draw.choice((-1, 1)) * LONGEST_JUMP_S ** self.draw.random()))
            case "disk" if self.disk is not None:
                self.disk.fill()
                self._end_after(lasts_s, self.disk.free)
            case "kill" | "stop":
                try:
                    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                except ProcessLookupError:
                    return False
                if kind == "stop":
                    self._end_after(lasts_s, lambda: _continue(pid))
        self.faults.append((kind, victim))
        print(f"seed {self.seed}, fault {len(self.faults)}: {kind} {victim}")  # noqa: T201 - shown when a test fails
        return True

    def end_all(self) -> None:
        """Wait until no process is stopped and the disk has space."""
        for timer in self._lasting:
            timer.join()
        self._lasting.clear()

    def _end_after(self, lasts_s: float, end: Callable[[], object]) -> None:
        """End a fault in a thread, because the caller may wait for the stopped process."""
        timer = threading.Timer(lasts_s, end)
        timer.start()
        self._lasting.append(timer)


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def is_running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
