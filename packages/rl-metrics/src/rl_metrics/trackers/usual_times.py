"""Durations of slow phases in earlier runs, shown while the same phase runs."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from statistics import median

from rl_core.errors import DataError
from rl_core.files import cache_folder, read_json_object

FILE = "usual_times.json"
NUM_KEPT = 5
MAX_SUBJECTS = 50


class UsualTimes:
    """The newest durations of each phase, in the user's cache folder; an unusable file is ignored."""

    def __init__(self, subject: str, *, file: Path | None = None) -> None:
        """Read the durations of earlier runs.

        Args:
            subject: What the durations depend on, such as the policy's path.
            file: File of the durations; None uses the user's cache folder.
        """
        self._subject = subject
        if file is None and (folder := cache_folder("rl-metrics")):
            file = folder / FILE
        self._file = file
        self._known = self._read().get(subject, {})

    def of(self, phase: str) -> float | None:
        """Return the median duration of a phase in earlier runs, in seconds, or None; ignores numbers in its name."""
        times = self._known.get(phase_key(phase), [])
        return median(times) if times else None

    def note(self, phase: str, took_s: float) -> None:
        """Store the duration of a phase, in seconds."""
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
        except (OSError, DataError, ValueError, TypeError, AttributeError):  # from another version, or truncated
            return {}


def phase_key(phase: str) -> str:
    """Return a key that is equal for phases whose names differ only in numbers."""
    return re.sub(r"\d+", "N", phase)
