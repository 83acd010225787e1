"""hang.json: each role's activity and waits when a run made no progress for too long.

Sizes are bounded, so that writing always succeeds: stacks and texts are cut, and only the oldest groups are kept.
"""

import math
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Literal

import msgspec

from rl_core.cluster import RoleReport, Wait, cut_middle
from rl_core.errors import DataError
from rl_core.files import read_plain, write_durably
from rl_core.record_fields import converts_arguments, record

HANG_FILE = "hang.json"
MAX_GROUPS = 50
MAX_ROLES = 1_000
MAX_ITEMS = 100
"""Maximum number of waits, leases or counts of a role."""
MAX_STACK = 32_000
MAX_STACKS = 4_000_000
"""Maximum number of characters of all roles' stacks."""
MAX_TEXT = 4_000
MAX_FILE_BYTES = 64 << 20


@record
class GroupRow:
    """An unfinished group.

    Attributes:
        uid: Identifier of its prompt.
        state: State in the queue's ledger: issued or settled.
        missing: Indices of the sessions that are not settled.
        age_s: Seconds since its latest issue.
        attempt: Number of times it was issued.
        holder: Role that holds it; None if no role does.
    """

    uid: str
    state: str
    missing: tuple[int, ...] = ()
    age_s: float = 0.0
    attempt: int = 1
    holder: str | None = None


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
        groups: Unfinished groups; a file has the oldest MAX_GROUPS.
        verdict: Who waits for whom, in words.
        causes: Ends of the waits.
        format: Identifier of the file format.
    """

    at: str
    run: str
    no_progress_s: float
    last_progress: str = ""
    roles: tuple[RoleReport, ...] = ()
    queue: Mapping[str, float] = field(default_factory=dict)
    groups: tuple[GroupRow, ...] = ()
    verdict: str = ""
    causes: tuple[str, ...] = ()
    format: Literal["rl-hang-1"] = "rl-hang-1"


@converts_arguments
def write_hang_report(path: Path, report: HangReport) -> None:
    """Write a report atomically, with its sizes bounded.

    Raises:
        OSError: The file cannot be written.
    """
    write_durably(path, msgspec.json.format(msgspec.json.encode(bounded(report)), indent=2) + b"\n")


def read_hang_report(path: Path) -> HangReport:
    """Read a report, with its sizes bounded.

    Raises:
        DataError: The file is missing, too large, or not such a report.
    """
    try:
        return bounded(msgspec.json.decode(read_plain(path, max_bytes=MAX_FILE_BYTES), type=HangReport))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{path} must be a hang report of the asynchronous trainer (format rl-hang-1); {error}."
        ) from None


def bounded(report: HangReport) -> HangReport:
    """Return the report with bounded sizes, and only numbers and characters that JSON can encode."""
    roles = report.roles[:MAX_ROLES]
    max_stack = min(MAX_STACK, MAX_STACKS // max(len(roles), 1))
    oldest = sorted(report.groups, key=lambda group: -group.age_s)[:MAX_GROUPS]
    return replace(
        report,
        run=_text(report.run),
        no_progress_s=_number(report.no_progress_s),
        last_progress=_text(report.last_progress),
        roles=tuple(_bounded_role(role, max_stack) for role in roles),
        queue=_numbers(report.queue),
        groups=tuple(
            replace(group, uid=_text(group.uid), missing=group.missing[:MAX_ITEMS], age_s=_number(group.age_s))
            for group in oldest
        ),
        verdict=_text(report.verdict),
        causes=tuple(_text(cause) for cause in report.causes[:MAX_ITEMS]),
    )


def _bounded_role(role: RoleReport, max_stack: int) -> RoleReport:
    longest = sorted(role.waits, key=lambda wait: -wait.since_s)[:MAX_ITEMS]
    return replace(
        role,
        name=_text(role.name),
        since_s=_number(role.since_s),
        waits=tuple(Wait(what=_text(one.what), on=_text(one.on), since_s=_number(one.since_s)) for one in longest),
        stack=_text(role.stack, max_stack),
        leases=tuple(_text(lease) for lease in role.leases[:MAX_ITEMS]),
        counts=_numbers(role.counts),
    )


def _text(text: str, length: int = MAX_TEXT) -> str:
    return cut_middle(text, length).encode(errors="backslashreplace").decode()


def _number(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    finite = [(_text(name), float(value)) for name, value in values.items() if math.isfinite(value)]
    return dict(finite[:MAX_ITEMS])
