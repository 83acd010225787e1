"""The state of one prompt in a queue: its sessions, rows and acks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl_core.queue.interface import LedgerEntry, PromptState

NO_COLUMNS: frozenset[str] = frozenset()
MAX_SESSIONS = 4096
"""Maximum number of sessions per prompt."""


class Part(NamedTuple):
    """Rows of a group in one segment, as a producer put them."""

    segment: int
    first: int
    num_rows: int
    num_tokens: int
    size_bytes: int
    oldest: int
    newest: int
    columns: frozenset[str]


class LatePart(NamedTuple):
    """Columns that a task added for all rows of a group."""

    segment: int
    first: int
    num_rows: int
    size_bytes: int
    task: str
    columns: frozenset[str]


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedGroup:
    """A queue's record of one prompt; `order` counts prompts in issue order.

    `settled` maps each session to the put that settled it; `acked` and `leased` map tasks to leases. The totals are
    derived from the parts; `counted` and `queued` belong to the index.
    """

    uid: str
    order: int
    num_sessions: int
    prompt: Any
    issued_at: float
    attempt: int = 1
    state: PromptState = "issued"
    reason: str | None = None
    settled: dict[int, str] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    late: list[LatePart] = field(default_factory=list)
    acked: dict[str, int] = field(default_factory=dict)
    leased: dict[str, int] = field(default_factory=dict)
    num_rows: int = 0
    num_tokens: int = 0
    size_bytes: int = 0
    oldest: int = -1
    newest: int = -1
    arrival: int = -1
    columns: frozenset[str] = NO_COLUMNS
    counted: Any = None
    queued: int = 0

    @property
    def is_open(self) -> bool:
        """False once the group is done or dropped."""
        return self.state in ("issued", "settled")

    @property
    def missing_sessions(self) -> list[int]:
        """Sessions that have neither rows nor a failure."""
        return [i for i in range(self.num_sessions) if i not in self.settled and i not in self.failures]

    def segments(self) -> Iterator[int]:
        """Return the segments of the group, one entry per part."""
        yield from (part.segment for part in self.parts)
        yield from (part.segment for part in self.late)

    def find_columns(self) -> None:
        """Update the set of columns that all rows have."""
        if len(self.parts) == 1:
            common = self.parts[0].columns
        else:
            common = frozenset.intersection(*(part.columns for part in self.parts)) if self.parts else NO_COLUMNS
        self.columns = common.union(*(part.columns for part in self.late)) if self.late else common

    def add_part(self, part: Part) -> None:
        """Add rows."""
        self.parts.append(part)
        self.num_rows += part.num_rows
        self.num_tokens += part.num_tokens
        self.size_bytes += part.size_bytes
        if part.oldest >= 0:
            self.oldest = part.oldest if self.oldest < 0 else min(self.oldest, part.oldest)
            self.newest = max(self.newest, part.newest)

    def add_late(self, part: LatePart) -> None:
        """Add columns for all rows."""
        self.late.append(part)
        self.size_bytes += part.size_bytes
        self.find_columns()

    def remove_late(self, part: LatePart) -> None:
        """Remove columns from all rows."""
        self.late.remove(part)
        self.size_bytes -= part.size_bytes
        self.find_columns()

    def clear(self) -> None:
        """Remove the rows."""
        self.parts, self.late, self.columns = [], [], NO_COLUMNS
        self.num_rows = self.num_tokens = self.size_bytes = 0
        self.oldest = self.newest = -1

    def entry(self) -> LedgerEntry:
        """Return the group's ledger entry."""
        return LedgerEntry(
            prompt_uid=self.uid,
            state=self.state,
            sessions_settled=len(self.settled) + len(self.failures),
            sessions_failed=dict(self.failures),
            acked_by=frozenset(self.acked),
            reason=self.reason,
            attempt=self.attempt,
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            policy_versions=(self.oldest, self.newest) if self.newest >= 0 else None,
        )
