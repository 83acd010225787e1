"""rollouts.jsonl: trajectories that trained, token by token; appended, never truncated."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import structlog

from rl_core.data import Json
from rl_core.errors import DataError
from rl_core.files import open_plain
from rl_core.record_fields import converts_arguments, record
from rl_metrics.run_files.json_lines import MAX_LINE_BYTES, JsonLinesWriter

log = structlog.get_logger(__name__)

T = TypeVar("T")

DIGITS = 5
"""Decimals that numbers of tokens are written with."""

LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""In a text; two that are a pair are one character of it."""

MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""In JSON."""

INT_COLUMNS = ("token_ids", "versions")
FLOAT_COLUMNS = ("rollout_logprobs", "policy_logprobs", "entropy", "advantages", "correction_weights")
TOKEN_COLUMNS = (*INT_COLUMNS, *FLOAT_COLUMNS)
"""Columns of a response's tokens that a trajectory may have beside the tokens themselves and their mask."""

ToldTurn = tuple[str, int, int, int | str, list[str], dict[str, int]]
"""A turn of an agent's session: the role that asked, the sampled tokens' place in the trajectory (start and stop), and
the output that trains it or why none does. Then the tools that it called, and its discarded tokens by reason."""


@record
class RolloutRow:
    """One trajectory of a step; token columns are of the response alone, and equally long.

    Attributes:
        step: That trained on it.
        time: Seconds since the epoch when it was written.
        prompt_uid: Its group.
        problem: Names the problem: the same in every epoch and at every step.
        session: Of the group, from 0.
        output: Of the session, from 0.
        source: Data source of the prompt.
        prompt: As text.
        response: As text.
        ground_truth: What was expected; None where nothing was.
        reward: NaN where it has none.
        components: Parts of the reward by name.
        extras: What the reward and the agent loop said beside it, as JSON.
        turns: Of an agent's session; none where the mask tells them.
        finish: Why the response ended: "stop", "length", "abort".
        timings: Seconds by part: generate_s, tools_s, reward_s; preemptions as a count.
        failure: Why its session failed; None when it did not.
        policy_version: The learner's, before the update.
        tokens: Text of each token.
        mask: True where the policy sampled the token.
        columns: Of `TOKEN_COLUMNS`, what is known: a number a token; NaN where it is not.
    """

    step: int
    time: float
    prompt_uid: str
    problem: str
    session: int = 0
    output: int = 0
    source: str = "default"
    prompt: str
    response: str
    ground_truth: str | None = None
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Json] = field(default_factory=dict)
    turns: tuple[ToldTurn, ...] = ()
    finish: str = "stop"
    timings: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    policy_version: int = 0
    tokens: tuple[str, ...] = ()
    mask: tuple[bool, ...] = ()
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @staticmethod
    def turns_in(extras: Mapping[str, Json]) -> tuple[ToldTurn, ...]:
        """The turns that a trajectory's extras tell of; none where "turns" is something else."""
        try:
            return msgspec.convert(extras.get("turns", ()), tuple[ToldTurn, ...])
        except msgspec.ValidationError:
            return ()

    def to_json(self) -> dict[str, Json]:
        """The row as JSON values; a number that is not finite is null."""
        row: dict[str, Json] = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "columns"}
        row["reward"] = _written(self.reward)
        row["components"] = {name: _written(value) for name, value in self.components.items()}
        row["timings"] = {name: _written(value) for name, value in self.timings.items()}
        row["mask"] = [int(is_sampled) for is_sampled in self.mask]
        for name in INT_COLUMNS:
            if name in self.columns:
                row[name] = [int(value) for value in self.columns[name]]
        for name in FLOAT_COLUMNS:
            if name in self.columns:
                row[name] = [_written(value) for value in self.columns[name]]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "RolloutRow":
        """What `to_json` gave; other keys are ignored.

        Raises:
            DataError: A field is missing, of another type, or columns are not equally long.
        """
        try:
            read = msgspec.convert(row, _Row)
        except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"a trajectory must have the fields of RolloutRow; found: {error}.") from None
        columns = {name: values for name in TOKEN_COLUMNS if (values := getattr(read, name)) is not None}
        mask = (1,) * len(read.tokens) if read.mask is None else read.mask
        lengths = {"mask": len(mask)} | {name: len(values) for name, values in columns.items()}
        for name, length in lengths.items():
            if length != len(read.tokens):
                raise DataError(f"{name} of a trajectory must have a value for each of {len(read.tokens)} tokens; "
                                f"found {length}.")  # fmt: skip
        return cls(
            **{one: getattr(read, one) for one in PLAIN_FIELDS},
            reward=_read(read.reward),
            components={name: _read(value) for name, value in read.components.items()},
            timings={name: _read(value) for name, value in read.timings.items()},
            mask=tuple(bool(is_sampled) for is_sampled in mask),
            columns={name: tuple(_read(value) for value in values) for name, values in columns.items()},
        )


class _Row(msgspec.Struct, frozen=True):
    """A line as it is written."""

    step: int
    prompt_uid: str
    prompt: str
    response: str
    problem: str = ""
    time: float = math.nan
    session: int = 0
    output: int = 0
    source: str = "default"
    ground_truth: str | None = None
    reward: float | None = None
    components: dict[str, float | None] = {}
    extras: dict[str, Any] = {}
    turns: tuple[ToldTurn, ...] = ()
    finish: str = "stop"
    timings: dict[str, float | None] = {}
    failure: str | None = None
    policy_version: int = 0
    tokens: tuple[str, ...] = ()
    mask: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    versions: tuple[int, ...] | None = None
    rollout_logprobs: tuple[float | None, ...] | None = None
    policy_logprobs: tuple[float | None, ...] | None = None
    entropy: tuple[float | None, ...] | None = None
    advantages: tuple[float | None, ...] | None = None
    correction_weights: tuple[float | None, ...] | None = None


PLAIN_FIELDS = tuple(
    one.name for one in fields(RolloutRow) if one.name not in ("reward", "components", "timings", "mask", "columns")
)


class RolloutLog:
    """Appends the trajectories of steps to a file."""

    @converts_arguments
    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; a resumed run goes on behind what is there.

        Args:
            path: Such as `run/rollouts.jsonl`.
            clock: Seconds since the epoch.
        """
        self._writer = JsonLinesWriter(path)
        self._clock = clock

    def write(self, rows: Sequence[RolloutRow]) -> None:
        """Append all rows of one step; their time is the clock's.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        written = round(self._clock(), 3)
        for index, row in enumerate(rows):
            self._writer.append_line(_encoded({**row.to_json(), "time": written, "index": index}))

    def close(self) -> None:
        """Close the file. Can be called twice."""
        self._writer.close()


def read_rollouts(path: Path) -> Iterator[RolloutRow]:
    """The trajectories of a run, one at a time, by rising steps; a file that is not there gives none.

    Lines that are torn or no trajectory are left out, with one warning at the end; the last line, while it has no line
    end, without one: it may be on its way. A resumed run repeats steps: what it wrote takes the place of what was there
    of the first of them and of later ones. U+FFFD stands for a lone surrogate, which is no text.
    """
    if not os.path.lexists(path):
        return
    with open_plain(path) as (file, _):
        batches, num_bad = _standing_batches(file)
        for batch in batches:
            file.seek(batch.start)
            while file.tell() < batch.end:
                line = file.readline(MAX_LINE_BYTES)
                try:
                    yield RolloutRow.from_json(_decoded(line))
                except DataError:
                    num_bad += _is_bad(line) and _place(line) is not None  # others are counted already
        if num_bad:
            log.warning("unreadable_lines", path=str(path), count=num_bad)


@dataclass(slots=True)
class _Batch:
    """Where the trajectories that were written together lie in the file."""

    step: int
    start: int
    end: int


class _Place(msgspec.Struct, frozen=True):
    """What a line begins a batch by."""

    step: int
    index: int


def _standing_batches(file: BinaryIO) -> tuple[list[_Batch], int]:
    """Records that no later launch has rewritten, and the number of lines without a trajectory's place."""
    batches: list[_Batch] = []
    end = num_bad = 0
    while line := file.readline(MAX_LINE_BYTES):  # what is longer is in pieces, which are no lines of trajectories
        start, end = end, end + len(line)
        place = _place(line)
        if place is None:
            num_bad += _is_bad(line)
            continue
        if not place.index or not batches or batches[-1].step != place.step:
            while batches and batches[-1].step >= place.step:
                batches.pop()
            batches.append(_Batch(place.step, start, end))
        batches[-1].end = end
    return batches, num_bad


def _is_bad(line: bytes) -> bool:
    """Whether a line that is no trajectory should be one: it has its end, and something before it."""
    return line.endswith(b"\n") and bool(line.strip())


def _place(line: bytes) -> _Place | None:
    try:
        return _decode(line, _Place)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _decoded(line: bytes) -> dict[str, Any]:
    """Of a line that has a place.

    Raises:
        DataError: It is no JSON object.
    """
    try:
        return _decode(line, dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"a line of trajectories must be a JSON object; found: {error}.") from None


def _decode(line: bytes, expected: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=expected)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        mended = without_surrogates(line)
        if mended is line:
            raise
        return msgspec.json.decode(mended, type=expected)


def without_surrogates(line: bytes) -> bytes:
    """A line of JSON with U+FFFD in place of lone surrogates, which Python writes; itself where it has none."""
    if MAYBE_SURROGATE.search(line) is None:
        return line
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False)
    except (ValueError, RecursionError):
        return line
    return LONE_SURROGATE.sub("\ufffd", text).encode()


def _encoded(row: Mapping[str, Json]) -> bytes:
    try:
        return msgspec.json.encode(row)
    except UnicodeEncodeError:  # a lone surrogate, which is no text
        return json.dumps(row, ensure_ascii=False).encode("utf-8", errors="replace")


def _written(value: float) -> float | None:
    return round(float(value), DIGITS) if math.isfinite(value) else None


def _read(value: float | None) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError:  # an integer beyond every float
        return math.nan
