"""rollouts.jsonl: trained trajectories, token by token; append-only."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import structlog

from rl_core.data import ImageSpan, Json
from rl_core.errors import DataError
from rl_core.record_fields import converts_arguments, record
from rl_metrics.run_files.json_lines import JsonLinesWriter

log = structlog.get_logger(__name__)

T = TypeVar("T")

DIGITS = 5
"""Number of decimals of written numbers."""

INT_COLUMNS = ("token_ids", "versions")
FLOAT_COLUMNS = ("rollout_logprobs", "policy_logprobs", "entropy", "advantages", "correction_weights")
TOKEN_COLUMNS = (*INT_COLUMNS, *FLOAT_COLUMNS)
"""Optional columns of a response's tokens, in addition to the tokens and their mask."""

ToldTurn = tuple[str, int, int, int | str, list[str], dict[str, int]]
"""A turn of an agent's session.

In order: the role that asked; start and stop of the sampled tokens in the trajectory; the output that trains them, or
why none does; the called tools; the number of discarded tokens by reason.
"""


@record
class RolloutRow:
    """One trajectory of a step; token columns cover only the response, and have equal lengths.

    Attributes:
        step: Step that trained on it.
        time: Time of writing, in seconds since the epoch.
        prompt_uid: Identifier of its group.
        problem: Identifier of the problem, equal in all epochs and steps.
        session: Index of the session in the group, from 0.
        output: Index of the output in the session, from 0.
        source: Data source of the prompt.
        prompt: Prompt as text.
        response: Response as text.
        ground_truth: Expected answer as the prompt gives it; None without one.
        reward: Reward; NaN without one.
        components: Parts of the reward by name.
        extras: Further values from the reward and the agent loop, as JSON.
        turns: Turns of an agent's session; empty if the mask shows them.
        images: Images among the trajectory's tokens, in order, as the folder `images` of the run has them. Texts have
            "[image 84x56]" in their place.
        finish: Why the response ended: "stop", "length", "abort".
        timings: Seconds by part (generate_s, tools_s, reward_s), and preemptions as a count.
        failure: Why its session failed; None if it did not.
        policy_version: The learner's version before the update.
        tokens: Text of each token.
        mask: Whether the policy sampled each token.
        columns: Known columns of `TOKEN_COLUMNS`, one number per token; NaN if unknown.
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
    ground_truth: Json = None
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Json] = field(default_factory=dict)
    turns: tuple[ToldTurn, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    finish: str = "stop"
    timings: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    policy_version: int = 0
    tokens: tuple[str, ...] = ()
    mask: tuple[bool, ...] = ()
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @staticmethod
    def turns_in(extras: Mapping[str, Json]) -> tuple[ToldTurn, ...]:
        """Return the turns in a trajectory's extras; empty if "turns" is something else."""
        try:
            return msgspec.convert(extras.get("turns", ()), tuple[ToldTurn, ...])
        except msgspec.ValidationError:
            return ()

    def to_json(self) -> dict[str, Json]:
        """Return the row as JSON values; numbers that are not finite are null."""
        row: dict[str, Json] = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "columns"}
        row["reward"] = _written(self.reward)
        row["components"] = {name: _written(value) for name, value in self.components.items()}
        row["timings"] = {name: _written(value) for name, value in self.timings.items()}
        row["images"] = msgspec.to_builtins(self.images)
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
        """Create a row from `to_json`; other keys are ignored.

        Raises:
            DataError: A field is missing or of another type, or the lengths of columns differ.
        """
        try:
            numbers = {
                "reward": _read(row["reward"]),
                "mask": list(map(bool, msgspec.convert(row["mask"], list[int]))),
                "columns": {name: list(map(_read, row[name])) for name in TOKEN_COLUMNS if name in row},
                **{part: {k: _read(v) for k, v in row[part].items()} for part in ("components", "timings")},
            }
            read = msgspec.convert({**row, **numbers}, cls)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:  # msgspec's: ValueErrors
            raise DataError(f"a trajectory must have the fields of RolloutRow; {error}.") from None
        for name, values in {"mask": read.mask, **read.columns}.items():
            if len(values) != len(read.tokens):
                raise DataError(f"{name} of a trajectory must have a value for each of {len(read.tokens)} tokens; "
                                f"found {len(values)}.")  # fmt: skip
        return read


class RolloutLog:
    """Appends the trajectories of steps to a file."""

    @converts_arguments
    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; a resumed run appends to it.

        Args:
            path: Path of the file, such as `run/rollouts.jsonl`.
            clock: Returns seconds since the epoch.
        """
        self._writer = JsonLinesWriter(path)
        self._clock = clock

    def write(self, rows: Sequence[RolloutRow]) -> None:
        """Append all rows of one step, with the time of the clock.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        written = round(self._clock(), 3)
        for index, row in enumerate(rows):
            self._writer.append_line(_encoded({**row.to_json(), "time": written, "index": index}))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()


def read_rollouts(path: Path) -> Iterator[RolloutRow]:
    """Yield the trajectories of a run, ordered by step; a missing file has none.

    Lines that are truncated or not a trajectory are skipped, with one warning at the end. A last line without a line
    break is skipped silently, because it may be incomplete. A resumed run repeats steps; its lines replace earlier ones
    of the first repeated step and later steps.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        batches, num_bad = _standing_batches(file)
        for batch in batches:
            file.seek(batch.start)
            while file.tell() < batch.end:
                line = file.readline()
                row = _decode(line, dict[str, Any])
                try:
                    yield RolloutRow.from_json(row or {})
                except DataError:
                    num_bad += _is_bad(line) and _decode(line, _Place) is not None  # the others are already counted
        if num_bad:
            log.warning("unreadable_lines", path=str(path), count=num_bad)


@dataclass(slots=True)
class _Batch:
    """Position in the file of trajectories written together."""

    step: int
    start: int
    end: int


class _Place(msgspec.Struct, frozen=True):
    """Fields of a line that show where a batch starts."""

    step: int
    index: int


def _standing_batches(file: BinaryIO) -> tuple[list[_Batch], int]:
    """Return batches not rewritten by a later launch, and the number of bad lines without a step and index."""
    batches: list[_Batch] = []
    end = num_bad = 0
    while line := file.readline():
        start, end = end, end + len(line)
        place = _decode(line, _Place)
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
    """Return whether a line without a trajectory counts as bad: it is complete and not blank."""
    return line.endswith(b"\n") and bool(line.strip())


def _decode(line: bytes, expected: type[T]) -> T | None:
    """Decode a line; None if it is something else."""
    try:
        return msgspec.json.decode(line, type=expected)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def _encoded(row: Mapping[str, Json]) -> bytes:
    try:
        return msgspec.json.encode(row)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, or an integer of more than 64 bits
        return json.dumps(row, ensure_ascii=False).encode("utf-8", errors="replace")


def _written(value: float) -> float | None:
    return round(float(value), DIGITS) if math.isfinite(value) else None


def _read(value: Any) -> Any:
    """Return NaN for null, a float for an integer, and else the value, which may be of a wrong type."""
    return math.nan if value is None else float(value) if type(value) is int else value
