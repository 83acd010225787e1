"""Reports on runs without progress, in hang.json: who does not answer, and what each role does."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Literal

import msgspec

from rl_core.cluster import RoleReport
from rl_core.files import read_record, write_durably
from rl_core.record_fields import converts_arguments, record

__all__ = ["HANG_FILE", "HangReport", "describe_trouble", "write_hang_report"]

HANG_FILE = "hang.json"


@record
class HangReport:
    """The report of a run without progress.

    Attributes:
        at: Time of the report, in ISO 8601.
        run: The run's folder.
        no_progress_s: Seconds since the last progress.
        last_progress: Description of the last progress.
        roles: Report of each role.
        queue: `TransferQueue.stats`; empty if the queue did not answer.
        causes: Who does not answer, or why nobody was asked; empty if all answer.
        format: Identifier of the file format.
    """

    at: str
    run: str
    no_progress_s: float
    last_progress: str = ""
    roles: tuple[RoleReport, ...] = ()
    queue: Mapping[str, float] = field(default_factory=dict)
    causes: tuple[str, ...] = ()
    format: Literal["rl-hang-2"] = "rl-hang-2"

    @property
    def summary(self) -> str:
        """The report in one sentence."""
        since = f", since: {self.last_progress}" if self.last_progress else ""
        return f"no progress for {self.no_progress_s:.0f} s{since}; {'; '.join(self.causes) or 'all roles answer'}"


def describe_trouble(roles: Sequence[RoleReport], queue: Mapping[str, float]) -> tuple[str, ...]:
    """Return which roles do not answer or do not serve.

    Args:
        roles: Report of each role.
        queue: `TransferQueue.stats`; empty if the queue did not answer.
    """
    troubles = []
    for role in roles:
        if not role.is_answering:
            troubles.append(f"{role.name} does not answer (for {role.since_s:.0f} s)")
        elif role.state != "serving":
            troubles.append(f"{role.name} is {role.state} (for {role.since_s:.0f} s)")
    return (*troubles, *(() if queue else ("the queue does not answer",)))


@converts_arguments
def write_hang_report(path: Path, report: HangReport) -> None:
    """Write a report atomically; numbers that are not finite are left out.

    Raises:
        OSError: The file cannot be written.
    """
    roles = tuple(replace(role, counts=_finite(role.counts)) for role in report.roles)
    report = replace(report, roles=roles, queue=_finite(report.queue))
    content = {"summary": report.summary, **msgspec.to_builtins(report)}
    write_durably(path, json.dumps(content, ensure_ascii=False, indent=2).encode(errors="replace") + b"\n")


def read_hang_report(path: Path) -> HangReport:
    """Read a report.

    Raises:
        DataError: The file is missing, or not such a report.
    """
    return read_record(path, HangReport)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
