"""record.jsonl: the order of a run's events, used to resume or replay it.

Each line has `what`, its fields, and a running number `at` that continues across launches:

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

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.data import Json
from rl_core.errors import DataError
from rl_core.files import preview
from rl_metrics.run_files import JsonLinesWriter, read_json_lines

FILE = "record.jsonl"


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
class History:
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
        found: list[tuple[str, ...]] = []
        while (number := step + len(found) + 1) in self.steps:
            found.append(self.steps[number])
        return found


def read_history(folder: Path) -> History:
    """Read the record in a run's folder; empty if there is none.

    Raises:
        DataError: A line has another format.
    """
    history = History()
    file = folder / FILE
    if not file.exists():
        return history
    for line in read_json_lines(file):
        try:
            _apply(history, line)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise DataError(f"{file} has an invalid line: {preview(line)} ({error!r}).") from None
    return history


def _apply(history: History, line: dict[str, Any]) -> None:
    what = line["what"]
    if what == "issued":
        history.issued.update(dict.fromkeys(_texts(line["uids"])))
    elif what == "started":
        started = dict.fromkeys(_texts(line["uids"]), int(line["version"]))
        history.started.update(started)
        for uid, version in started.items():
            history.begun.setdefault(uid, version)
        history.places.update(zip(_texts(line["uids"]), map(int, line.get("places", ())), strict=False))
    elif what == "settled":
        history.settled.pop(str(line["uid"]), None)
        history.settled[str(line["uid"])] = (_version(line["oldest"]), _version(line["newest"]))
        if line.get("started") is not None:
            history.started[str(line["uid"])] = int(line["started"])
    elif what == "failed":
        history.failed[str(line["uid"])] = str(line["reason"])
    elif what == "step":
        _apply_step(history, int(line["step"]), tuple(_texts(line["uids"])))
    elif what == "published":
        history.published[int(line["version"])] = int(line["step"])


def _apply_step(history: History, step: int, uids: tuple[str, ...]) -> None:
    """Enter a step; if it replaces another, all later steps are void."""
    if history.steps.get(step, uids) != uids:
        history.steps = {number: groups for number, groups in history.steps.items() if number < step}
    history.steps[step] = uids


def _texts(values: Iterable[Any]) -> list[str]:
    return [str(value) for value in values]


def _version(value: Any) -> int | None:
    return None if value is None else int(value)
