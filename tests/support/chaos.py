"""Faults drawn from a seed: processes that are killed or stopped for a while, a full disk, a clock that jumps.

Where this process may not mount, no disk is filled.
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
"""A fault is one of these; those that stand here twice come twice as often."""
LONGEST_S = 1.0
"""Most seconds that a process is stopped, or that a disk stays full."""
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
        """Make it differ from the true time by this much."""
        with self._file.open("r+b") as file:
            file.write(OFFSET_S.pack(offset_s))


class Disk:
    """A small disk of memory, which is full on demand."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._ballast = place / ".ballast"

    def fill(self) -> None:
        """Leave no block free; those that a process frees meanwhile are taken, too."""
        with self._ballast.open("ab") as file:
            for _ in range(3):
                free = os.statvfs(self.place)
                with suppress(OSError):  # others write meanwhile
                    if free.f_bavail:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free.f_bavail * free.f_bsize)

    def free(self) -> None:
        """Give the blocks back."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(place: Path, *, size_mib: int) -> Iterator[Disk | None]:
    """A disk mounted at a folder, which is made; None where this process may not mount."""
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
    """Makes faults, ends those that last, and keeps the books.

    Attributes:
        seed: Draws everything.
        clock: Of the processes.
        disk: Theirs; None where it cannot be filled.
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
        """The next fault's kind, of those that this machine can do."""
        return self.draw.choice([kind for kind in KINDS if kind != "disk" or self.disk is not None])

    def make(self, kind: str, pid: int = 0, victim: str = "") -> bool:
        """Make a fault; False where the process was gone already."""
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
        """Wait until no process is stopped and the disk has room."""
        for timer in self._lasting:
            timer.join()
        self._lasting.clear()

    def _end_after(self, lasts_s: float, end: Callable[[], object]) -> None:
        """End a fault by a thread: whoever made it may wait for the process that is stopped."""
        timer = threading.Timer(lasts_s, end)
        timer.start()
        self._lasting.append(timer)


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
