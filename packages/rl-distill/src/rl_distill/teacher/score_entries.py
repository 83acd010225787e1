"""Entries of a score cache: the scores of many trajectories.

The description has the key of each trajectory and the number of its trained tokens; `logprobs`, `token_ids` and
`hidden` concatenate the trained tokens of all trajectories.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from rl_core.data import Json
from rl_core.errors import BrokenEntryError
from rl_core.files import preview
from rl_core.files.array_entries import Entry, EntryFolder
from rl_distill.teacher.scores import TeacherScores

MAX_ENTRY_BYTES = 1 << 32
MAX_SHOWN = 240
DTYPES = {"logprobs": "float32", "token_ids": "int32", "hidden": "float32"}

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class _Description(msgspec.Struct, forbid_unknown_fields=True):
    """Description of an entry.

    Attributes:
        kind: What the scores are of, for human readers.
        counts: Number of trained tokens of each trajectory, by key.
        hidden_size: Width of the hidden states; 0 without.
    """

    kind: dict[str, Json]
    counts: dict[str, Count]
    hidden_size: Count


def read_keys(folder: EntryFolder, name: str) -> list[str]:
    """Return the keys of the trajectories in an entry, without reading the scores.

    Raises:
        BrokenEntryError: It is not an entry of scores.
    """
    with folder.open(name) as entry:
        return [] if entry is None else list(_described(entry).counts)


def read_scores(folder: EntryFolder, name: str, *, width: int) -> dict[str, TeacherScores]:
    """Return the scores of an entry at trained tokens, by key.

    Args:
        folder: Folder of the entries.
        name: Name of the entry.
        width: K + 1, the scores per token.

    Raises:
        BrokenEntryError: It is missing, or not a complete entry of such scores.
    """
    with folder.open(name) as entry:
        if entry is None:
            raise BrokenEntryError(folder.path_of(name), "it does not exist")
        described, arrays = _described(entry), entry.read(DTYPES)
    ends = np.cumsum([0, *described.counts.values()])
    widths = {"logprobs": width, "token_ids": width} | ({"hidden": size} if (size := described.hidden_size) else {})
    lengths = {column: len(values) for column, values in arrays.items()}
    if lengths != (expected := {column: ends[-1] * size for column, size in widths.items()}):
        raise BrokenEntryError(entry.path, f"its arrays have {lengths} values; expected {expected}")
    columns = {column: arrays[column].reshape(-1, size) for column, size in widths.items()}
    return {
        key: TeacherScores(**{column: values[start:stop] for column, values in columns.items()})
        for key, start, stop in zip(described.counts, ends[:-1], ends[1:], strict=True)
    }


def write_entry(folder: EntryFolder, rows: Mapping[str, TeacherScores], *, kind: Mapping[str, Json]) -> str:
    """Write trajectories as a new entry, and return its name.

    Args:
        folder: Folder of the entries.
        rows: Scores at trained tokens by key; at least one trajectory, all of the same width.
        kind: What the scores are of, for human readers.

    Raises:
        CacheError: The entry cannot be written; no part of it remains.
    """
    stored = list(rows.values())
    columns = [column for column in DTYPES if getattr(stored[0], column) is not None]
    arrays = ((column, np.concatenate([getattr(row, column) for row in stored]).reshape(-1)) for column in columns)
    hidden = stored[0].hidden
    described = _Description(
        kind=dict(kind),
        counts={key: len(row.logprobs) for key, row in rows.items()},
        hidden_size=0 if hidden is None else hidden.shape[1],
    )
    name = f"scores-{secrets.token_hex(8)}"
    folder.write(name, msgspec.to_builtins(described), arrays)
    return name


def _described(entry: Entry) -> _Description:
    try:
        return msgspec.convert(entry.description, _Description)
    except Exception as error:  # numbers and nesting that strangers chose raise many types
        shown = preview(str(error), most=MAX_SHOWN)[1:-1]
        raise BrokenEntryError(entry.path, f"its description is not one of scores ({shown})") from None
