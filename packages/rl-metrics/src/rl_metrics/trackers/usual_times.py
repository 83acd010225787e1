"""How long the slow phases of earlier runs took, to show while the same phase runs."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from statistics import median

from rl_core.errors import DataError
from rl_core.files import read_json_object

FILE = "rl-metrics/usual_times.json"
NUM_KEPT = 5
MAX_SUBJECTS = 50


class UsualTimes:
    """The newest few times of each phase, in the user's cache folder; a file that cannot be used is no error."""

    def __init__(self, subject: str, *, file: Path | None = None) -> None:
        """Read what earlier runs took.

        Args:
            subject: What the times depend on, such as the policy's path.
            file: Where they are kept; None is in the user's cache folder.
        """
        self._subject = subject
        self._file = file
        if file is None:
            with suppress(RuntimeError):  # this user has no home
                self._file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / FILE
        self._known = self._read().get(subject, {})

    def of(self, phase: str) -> float | None:
        """Median seconds of a phase in earlier runs; None where there was none. Numbers in its name do not count."""
        times = self._known.get(phase_key(phase), [])
        return median(times) if times else None

    def note(self, phase: str, took_s: float) -> None:
        """Keep how long a phase took."""
        if self._file is None:
            return
        subjects = self._read()
        times = subjects.pop(self._subject, {})
        times[phase_key(phase)] = [*times.get(phase_key(phase), []), round(took_s, 2)][-NUM_KEPT:]
        newest = dict([*subjects.items(), (self._subject, times)][-MAX_SUBJECTS:])
        part = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_text(json.dumps(newest))
            part.replace(self._file)

    def _read(self) -> dict[str, dict[str, list[float]]]:
        if self._file is None:
            return {}
        try:
            found = read_json_object(self._file)
            return {
                subject: {phase: [float(took_s) for took_s in times] for phase, times in phases.items()}
                for subject, phases in found.items()
            }
        except (OSError, DataError, ValueError, TypeError, AttributeError):  # another version's, or torn
            return {}


def phase_key(phase: str) -> str:
    """What phases have in common that differ by the number of a step alone."""
    return re.sub(r"\d+", "N", phase)
