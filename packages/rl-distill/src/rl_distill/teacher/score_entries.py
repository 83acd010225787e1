"""Entries of a score cache: the scores of many trajectories, read in parts and verified.

`keys` has 32 bytes per trajectory, and `counts` the number of its trained tokens; `logprobs`, `token_ids` and `hidden`
concatenate the trained tokens of all trajectories.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Json
from rl_core.errors import BrokenEntryError
from rl_core.files.array_entries import EntryFolder
from rl_distill.teacher.scores import TeacherScores

FORMAT = 2
MAX_ENTRY_BYTES = 1 << 32
CHUNK_BYTES = 1 << 19
"""Bytes of an array that are read at once; 512 tokens with the top 64 tokens each have 133 KB per array."""
KEY_BYTES = 32
DTYPES = {"keys": "uint8", "counts": "int32", "logprobs": "float32", "token_ids": "int32", "hidden": "float32"}


class ScoreEntry:
    """An entry with its keys in memory; scores are read on demand."""

    def __init__(self, folder: EntryFolder, name: str, *, width: int) -> None:
        """Read the keys.

        Args:
            folder: Folder of the entries.
            name: Name of the entry.
            width: K + 1, the scores per token.

        Raises:
            BrokenEntryError: It does not exist, or is not a complete entry of such scores.
        """
        self._folder, self._name, self._width = folder, name, width
        with folder.open(name) as entry:
            if entry is None:
                raise BrokenEntryError(folder.path_of(name), "it does not exist")
            if entry.description.get("format") != FORMAT:
                raise BrokenEntryError(entry.path, f"it must have format {FORMAT}")
            self._hidden_size = hidden_size = entry.description.get("hidden_size")
            lengths = {each: entry.length(each, DTYPES[each]) for each in DTYPES if each != "hidden" or hidden_size}
            raw = entry.part("keys", "uint8", 0, lengths["keys"]).tobytes()
            counts = entry.part("counts", "int32", 0, lengths["counts"]).astype(np.int64)
        self.keys = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        num_tokens = int(self._starts[-1])
        expected = {
            "keys": len(counts) * KEY_BYTES,
            "counts": len(counts),
            "logprobs": num_tokens * width,
            "token_ids": num_tokens * width,
        }
        expected |= {"hidden": num_tokens * hidden_size} if type(hidden_size) is int and hidden_size > 0 else {}
        if counts.min(initial=0) < 0 or lengths != expected:
            raise BrokenEntryError(folder.path_of(name), f"its arrays have {lengths} values; expected {expected}")

    def read(self, rows: Sequence[int]) -> list[TeacherScores]:
        """Return the scores of the trajectories with these indices, at their trained tokens.

        Raises:
            BrokenEntryError: It is missing or damaged.
        """
        with self._folder.open(self._name) as entry:
            if entry is None:
                raise BrokenEntryError(self._folder.path_of(self._name), "it does not exist")
            spans = [(row, row + 1) for row in rows]
            if max(rows) - min(rows) < 2 * len(rows):  # dense: decode each chunk once
                spans = [(min(rows), max(rows) + 1)]

            def values(name: str, width: int) -> list[NDArray[Any]]:
                found = {}
                for first, last in spans:
                    start, stop = int(self._starts[first]), int(self._starts[last])
                    part = entry.part(name, DTYPES[name], start * width, stop * width).reshape(-1, width)
                    for row in range(first, last):
                        found[row] = part[self._starts[row] - start : self._starts[row + 1] - start]
                return [found[row] for row in rows]

            logprobs, token_ids = values("logprobs", self._width), values("token_ids", self._width)
            hidden = values("hidden", self._hidden_size) if self._hidden_size else [None] * len(rows)
        return [
            TeacherScores(logprobs=logprobs[number], token_ids=token_ids[number], hidden=hidden[number])
            for number in range(len(rows))
        ]


def write_entry(folder: EntryFolder, rows: Mapping[bytes, TeacherScores], *, kind: Mapping[str, Json]) -> str:
    """Write trajectories as a new entry, and return its name.

    Args:
        folder: Folder of the entries.
        rows: Scores at trained tokens by key; at least one trajectory, all of the same width.
        kind: What the scores are of, for human readers.

    Raises:
        CacheError: The entry cannot be written; no part of it remains.
    """
    stored = list(rows.values())
    arrays: dict[str, NDArray[Any]] = {
        "keys": np.frombuffer(b"".join(rows), dtype=np.uint8),
        "counts": np.asarray([len(row.logprobs) for row in stored], dtype=np.int32),
        "logprobs": np.concatenate([row.logprobs.reshape(-1) for row in stored]),
        "token_ids": np.concatenate([row.token_ids.reshape(-1) for row in stored]),
    }
    states = [row.hidden for row in stored if row.hidden is not None]
    if states:
        arrays["hidden"] = np.concatenate([state.reshape(-1) for state in states])
    name = f"scores-{secrets.token_hex(8)}"
    hidden_size = states[0].shape[1] if states else 0
    description = {"format": FORMAT, "kind": dict(kind), "hidden_size": hidden_size}
    folder.write(name, description, arrays.items(), chunk_bytes=CHUNK_BYTES)
    return name
