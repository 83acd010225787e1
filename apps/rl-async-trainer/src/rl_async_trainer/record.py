"""A run's state in checkpoints, and record.jsonl: the order of its events, used to resume or replay it.

Each line of the record has `what`, its fields, and a running number `at` that continues across launches:

- `issued`: prompts entered the queue; `uids` in order
- `started`: groups `uids` were sent to the rollouter while `version` was served; `places` are theirs in the order of
  training
- `settled`: group `uid` is complete, with the `oldest` and `newest` version of its tokens, and the version served when
  it was `started`; a group from a skip cache has no `oldest` version
- `failed`: group `uid` will not be trained, for `reason`
- `aborted`: groups `uids` were lost with the rollouter, for `reason`; they are started again
- `step`: the groups `uids` of `step`, which counts from 1
- `published`: the engines serve `version`, with its `fingerprint`, after `step` steps
- `resumed`: a launch began, or the learner was restored, after `step` steps. Later recorded steps are trained again; if
  one of them then has other groups, its old record and all later ones are void
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.data import Json
from rl_core.errors import DataError
from rl_core.files import preview
from rl_metrics.run_files import JsonLinesWriter, read_json_lines
from rl_trainer_parts.run.folder import RunState

FILE = "record.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncState(RunState):
    """The run at the end of a step: the controller's state in a checkpoint, beside the learner's.

    Attributes:
        num_trained: Number of groups trained so far.
        num_spent: Number of groups that failed and were not replaced.
        validated: Last validated step; -1 before the first.
        unacked: Groups in this checkpoint that the queue may not know as done.
    """

    num_trained: int = 0
    num_spent: int = 0
    validated: int = -1
    unacked: Sequence[str] = ()


class ScheduleRecord:
    """Appends events to a run's record; a kill loses at most the line being written."""

    def __init__(self, folder: Path) -> None:
        """Open or create the record in a run's folder, and append to it."""
        self._file = JsonLinesWriter(folder / FILE)
        with self._file.path.open("rb") as lines:
            self._num_lines = sum(1 for _ in lines)  # including a torn line

    def write(self, what: str, **fields: Json) -> None:
        """Append a line."""
        self._file.append({"at": self._num_lines, "what": what, **fields})
        self._num_lines += 1

    def close(self) -> None:
        """Close the file. Can be called twice."""
        self._file.close()


@dataclass(slots=True)
class ScheduleHistory:
    """Contents of a record, without steps that later ones replaced.

    Attributes:
        issued: Prompts in order.
        steps: Groups of each step by its number.
        started: For each prompt, the version served when it was last started.
        begun: For each prompt, the version served when it was first started.
        places: For each started prompt, its place in the order of training.
        settled: Groups in order of arrival; a group that arrived twice counts at its last arrival.
        failed: Reason of each failed group.
        published: For each version, the number of steps before it.
    """

    issued: dict[str, None] = field(default_factory=dict)
    steps: dict[int, tuple[str, ...]] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    settled: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)

    def steps_after(self, step: int) -> list[tuple[str, ...]]:
        """Groups of the recorded steps after a given one, as long as they are consecutive."""
        numbers = itertools.takewhile(self.steps.__contains__, itertools.count(step + 1))
        return [self.steps[number] for number in numbers]


def read_history(folder: Path) -> ScheduleHistory:
    """Read the record in a run's folder; empty if there is none.

    Raises:
        DataError: A line has another format.
    """
    history = ScheduleHistory()
    file = folder / FILE
    if not file.exists():
        return history
    for line in read_json_lines(file):
        try:
            _apply(history, line)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise DataError(f"{file} has an invalid line: {preview(line)} ({error!r}).") from None
    return history


def _apply(history: ScheduleHistory, line: dict[str, Any]) -> None:
    what = line["what"]
    uids = tuple(map(str, line["uids"])) if what in ("issued", "started", "step") else ()
    if what == "issued":
        history.issued.update(dict.fromkeys(uids))
    elif what == "started":
        started = dict.fromkeys(uids, int(line["version"]))
        history.started.update(started)
        for uid, version in started.items():
            history.begun.setdefault(uid, version)
        history.places.update(zip(uids, map(int, line.get("places", ())), strict=False))
    elif what == "settled":
        uid = str(line["uid"])
        history.settled.pop(uid, None)
        history.settled[uid] = (_version(line["oldest"]), _version(line["newest"]))
        if line.get("started") is not None:
            history.started[uid] = int(line["started"])
    elif what == "failed":
        history.failed[str(line["uid"])] = str(line["reason"])
    elif what == "step":
        step = int(line["step"])
        if history.steps.get(step, uids) != uids:  # it replaces another, so all later steps are void
            history.steps = {number: groups for number, groups in history.steps.items() if number < step}
        history.steps[step] = uids
    elif what == "published":
        history.published[int(line["version"])] = int(line["step"])


def _version(value: Any) -> int | None:
    return None if value is None else int(value)
