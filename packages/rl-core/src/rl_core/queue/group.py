"""One prompt's way through a queue: its sessions, its rows, and who has acked them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl_core.queue.interface import LedgerEntry, PromptState, TaskSpec
from rl_core.queue.messages import GENERATE

NO_COLUMNS: frozenset[str] = frozenset()


class Part(NamedTuple):
    """Rows of a group that lie together in one segment, as a producer put them."""

    segment: int
    first: int
    num_rows: int
    num_tokens: int
    size_bytes: int
    oldest: int
    newest: int
    columns: frozenset[str]


class LatePart(NamedTuple):
    """Columns that a task gave for all rows of a group."""

    segment: int
    first: int
    num_rows: int
    size_bytes: int
    task: str
    columns: frozenset[str]


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedGroup:
    """The record that a queue keeps for each prompt; `order` counts prompts as they were issued.

    `settled` has the put that settled each session, `acked` and `leased` the lease of each task. `counted` and `queued`
    belong to the index.
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
    arrival: int = -1
    columns: frozenset[str] = NO_COLUMNS
    counted: Any = None
    queued: int = 0

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Tokens of these rows."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of their columns."""
        return sum(part.size_bytes for part in self.parts) + sum(part.size_bytes for part in self.late)

    @property
    def oldest(self) -> int:
        """Oldest policy version of a sampled token; -1 without any."""
        return min((part.oldest for part in self.parts if part.oldest >= 0), default=-1)

    @property
    def newest(self) -> int:
        """Newest policy version of a sampled token; -1 without any."""
        return max((part.newest for part in self.parts), default=-1)

    @property
    def is_open(self) -> bool:
        """False once it is done or dropped."""
        return self.state in ("issued", "settled")

    @property
    def missing_sessions(self) -> list[int]:
        """Sessions that neither gave rows nor failed."""
        return [i for i in range(self.num_sessions) if i not in self.settled and i not in self.failures]

    def segments(self) -> Iterator[int]:
        """Segments that hold something of it, each as often as it has a part there."""
        yield from (part.segment for part in self.parts)
        yield from (part.segment for part in self.late)

    def find_columns(self) -> None:
        """Note which columns all rows have."""
        common = frozenset.intersection(*(part.columns for part in self.parts)) if self.parts else NO_COLUMNS
        self.columns = common.union(*(part.columns for part in self.late))

    def clear(self) -> None:
        """Let go of the rows."""
        self.parts, self.late, self.columns = [], [], NO_COLUMNS

    def is_ready_for(self, task: TaskSpec) -> bool:
        """True when the task may lease this group now."""
        if task.name in self.leased:
            return False
        if task.name == GENERATE:
            return self.state == "issued"
        return self.state == "settled" and task.name not in self.acked and task.needs <= self.columns

    def may_become_ready_for(self, task: TaskSpec) -> bool:
        """True while the group can still be leased by the task, now or later."""
        if task.name == GENERATE:
            return self.state == "issued"
        return self.is_open and task.name not in self.acked

    def entry(self) -> LedgerEntry:
        """The ledger's line."""
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
