"""Trajectories in the page's format: one index, and texts and tokens in chunks."""

import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_metrics.report.blobs import BlobSink
from rl_metrics.report.packing import Kind, pack
from rl_metrics.run_files.json_lines import as_plain
from rl_metrics.run_files.rollout_log import FLOAT_COLUMNS, RolloutRow

CHUNK_ROWS = 512
CHUNK_TOKENS = 1 << 15
CHUNK_CHARACTERS = 1 << 21
"""A chunk ends with the trajectory that reaches one of these limits."""

NAME_CHARACTERS = 200
"""Maximum length of names in filters, such as failures of sessions; the trajectory shows the complete name."""

UNNAMED = "(none)"
"""Name of a source or finish without one."""

MAX_PARTS = 16
"""Maximum number of reward parts in filters; the trajectory shows all."""

SNIPPET_CHARACTERS = 80
"""Maximum length of a prompt or response in the list of trajectories."""

TEMPLATE_CHARACTERS = 24
"""Minimum length of a common prefix of all prompts to leave it out of the list."""

SEEN_CHARACTERS = 300
"""Number of characters of a prompt in which a common prefix is searched."""

ASKED = re.compile(
    r"<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>\s*|<start_of_turn>user\n"
    r"|<\|start\|>user<\|message\|>|<[|\uff5c][Uu]ser[|\uff5c]>|\[INST\]"
)
ANSWERED = re.compile(
    r"</think>|<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\s*"
    r"|<start_of_turn>model\n|<\|message\|>|<[|\uff5c][Aa]ssistant[|\uff5c]>|\[/INST\]"
)
"""The list shows the text after the last match of ASKED in a prompt, and of ANSWERED in a response."""

CONTROL = re.compile(r"<[|\uff5c][^<>|\s]{1,40}[|\uff5c]>|<end_of_turn>|\[/INST\]")

UNKNOWN = -1
"""Staleness of a trajectory with unknown versions."""

INDEX_KINDS: dict[str, Kind] = {
    "step": "i32",
    "reward": "f32",
    "length": "i32",
    "source": "i32",
    "problem": "i32",
    "finish": "i32",
    "failure": "i32",
    "version": "i32",
    "staleness": "i32",
    "mismatch": "f32",
    "entropy": "f32",
    "advantage": "f32",
    "seconds": "f32",
}
"""Columns of the index; sources, problems, finishes and failures are codes of the header's names."""


@dataclass(slots=True)
class _Chunk:
    """Trajectories packed together."""

    texts: list[list[Any]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    codes: "array[int]" = field(default_factory=lambda: array("q"))
    mask: bytearray = field(default_factory=bytearray)
    versions: "array[float]" = field(default_factory=lambda: array("d"))
    floats: dict[str, "array[float]"] = field(default_factory=lambda: {name: array("d") for name in FLOAT_COLUMNS})
    tokens: dict[tuple[str, float], int] = field(default_factory=dict)
    num_characters: int = 0

    @property
    def is_full(self) -> bool:
        return (
            len(self.texts) >= CHUNK_ROWS or len(self.codes) >= CHUNK_TOKENS or self.num_characters >= CHUNK_CHARACTERS
        )

    def add(self, row: RolloutRow) -> None:
        self.texts.append(
            [
                *(row.prompt, row.response, as_plain(row.ground_truth)),
                *(row.prompt_uid, row.session, row.output, row.time),
                *(row.failure, dict(row.components), dict(row.timings), dict(row.extras), row.turns),
            ]
        )
        self.num_characters += len(row.prompt) + len(row.response) + len(row.failure or "") + len(str(row.extras))
        self.num_characters += len(str(row.turns))
        count = len(row.tokens)
        self.lengths.append(count)
        ids = row.columns.get("token_ids") or (-1.0,) * count
        known = self.tokens
        self.codes.extend([known.setdefault(token, len(known)) for token in zip(row.tokens, ids, strict=True)])
        self.mask.extend(map(bool, row.mask))
        self.versions.extend(row.columns.get("versions") or (math.nan,) * count)
        for name, values in self.floats.items():
            values.extend(row.columns.get(name) or (math.nan,) * count)

    def measures(self) -> dict[str, NDArray[np.float64]]:
        """Return [rows] measures over each trajectory's sampled tokens; NaN if unknown."""
        count = len(self.lengths)
        is_sampled = np.frombuffer(self.mask, np.uint8).astype(bool)
        row = np.repeat(np.arange(count), self.lengths)[is_sampled]
        column = {name: np.array(values)[is_sampled] for name, values in self.floats.items()}
        versions = np.array(self.versions)[is_sampled]
        oldest = np.full(count, np.inf)
        np.minimum.at(oldest, row, np.where(np.isnan(versions), np.inf, versions))
        rollout, policy = (np.exp(np.minimum(column[name], 0.0)) for name in ("rollout_logprobs", "policy_logprobs"))
        return {
            "oldest": np.where(np.isinf(oldest), np.nan, oldest),
            "mismatch": _means(np.abs(policy - rollout), row, count),
            "entropy": _means(column["entropy"], row, count),
            "advantage": _means(column["advantages"], row, count),
        }

    def pack_texts(self) -> bytes:
        return pack({"rows": self.texts}, {})

    def pack_tokens(self) -> bytes:
        header = {
            "tokens": [token for token, _ in self.tokens],
            "ids": [_whole(token_id) for _, token_id in self.tokens],
        }
        columns: dict[str, tuple[Kind, Any]] = {
            "lengths": ("i32", self.lengths),
            "codes": ("i32", self.codes),
            "mask": ("u8", self.mask),
        }
        floats = {"versions": self.versions, **self.floats}
        known = {name: values for name, values in floats.items() if not np.isnan(values).all()}
        return pack(header, columns | {name: ("f32", values) for name, values in known.items()})


class RolloutPacker:
    """Packs trajectories one at a time, with only one chunk in memory."""

    def __init__(self, sink: BlobSink) -> None:
        """Start without trajectories.

        Args:
            sink: Destination of the packed parts.
        """
        self._sink = sink
        self._chunk = _Chunk()
        self._chunks: list[dict[str, Any]] = []
        self._count = 0
        self._codes: dict[str, dict[str, int]] = {name: {} for name in ("source", "problem", "finish", "failure")}
        self._codes["failure"][""] = 0  # none
        self._parts: dict[str, array[float]] = {}
        self._prompts: list[str] = []
        self._responses: list[str] = []
        self._index: dict[str, array[float]] = {name: array("d") for name in INDEX_KINDS}

    def add(self, row: RolloutRow) -> None:
        """Add the next trajectory."""
        times = [value for name, value in row.timings.items() if name.endswith("_s") and math.isfinite(value)]
        for name, value in (
            ("step", row.step),
            ("reward", row.reward),
            ("length", len(row.tokens)),
            ("version", row.policy_version),
            ("seconds", sum(times)),
        ):
            self._index[name].append(value)
        for name, text in (
            ("source", row.source or UNNAMED),
            ("problem", row.problem or row.prompt_uid),
            ("finish", row.finish or UNNAMED),
            ("failure", row.failure or ""),
        ):
            codes = self._codes[name]
            self._index[name].append(codes.setdefault(short_name(text), len(codes)))
        if len(self._codes["problem"]) > len(self._prompts):
            self._prompts.append(_last_part(row.prompt, ASKED)[:SEEN_CHARACTERS])
        self._responses.append(one_line(_last_part(row.response, ANSWERED)))
        add_parts(self._parts, row.components, count=self._count)
        self._chunk.add(row)
        self._count += 1
        if self._chunk.is_full:
            self._flush()

    def finish(self, *, num_recorded: int | None = None) -> str:
        """Pack the rest and return the name of the index.

        Args:
            num_recorded: Number of recorded trajectories, including omitted ones; None if none were omitted.
        """
        self._flush()
        header = {
            "chunks": self._chunks,
            "recorded": self._count if num_recorded is None else num_recorded,
            "names": {name: list(codes) for name, codes in self._codes.items()},
            "parts": list(self._parts),
            "prompts": _told_apart(self._prompts),
            "responses": self._responses,
        }
        columns: dict[str, tuple[Kind, Any]] = {name: (kind, self._index[name]) for name, kind in INDEX_KINDS.items()}
        for number, values in enumerate(self._parts.values()):
            columns[f"part{number}"] = ("f32", values)
        return self._sink(pack(header, columns))

    def _flush(self) -> None:
        if self._chunk.texts:
            measures = self._chunk.measures()
            version = np.array(self._index["version"][self._count - len(self._chunk.texts) :])
            staleness = np.nan_to_num(version - measures.pop("oldest"), nan=UNKNOWN)
            for name, values in {"staleness": staleness, **measures}.items():
                self._index[name].extend(values.tolist())
            self._chunks.append(
                {
                    "first": self._count - len(self._chunk.texts),
                    "texts": self._sink(self._chunk.pack_texts()),
                    "tokens": self._sink(self._chunk.pack_tokens()),
                }
            )
            self._chunk = _Chunk()


def add_parts(parts: dict[str, "array[float]"], components: Mapping[str, float], *, count: int) -> None:
    """Add a row's components to the columns of the first `MAX_PARTS` parts; the columns have `count` rows."""
    for name in components:
        if len(parts) < MAX_PARTS and short_name(name) not in parts:
            parts[short_name(name)] = array("d", (math.nan,) * count)
    known = {short_name(name): value for name, value in components.items()}
    for name, values in parts.items():
        values.append(known.get(name, math.nan))


def short_name(name: str) -> str:
    """Return the name, or the beginning of a long one with a digest that keeps it unique."""
    if len(name) <= NAME_CHARACTERS:
        return name
    return f"{name[:NAME_CHARACTERS]}… {blake2b(name.encode(errors='surrogatepass'), digest_size=6).hexdigest()}"


def _told_apart(prompts: list[str]) -> list[str]:
    """Return the beginnings of the prompts without a common template."""
    first, last = min(prompts, default=""), max(prompts, default="")
    shared = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(last))
    length = max(last.rfind(" ", 0, shared), last.rfind("\n", 0, shared)) + 1 if len(prompts) > 1 else 0
    if length < TEMPLATE_CHARACTERS:
        return [one_line(prompt) for prompt in prompts]
    return [f"…{one_line(prompt[length:])}" for prompt in prompts]


def _last_part(text: str, begin: re.Pattern[str]) -> str:
    """Return the text after the last match, up to a control token; the complete text if that is blank."""
    start = max((found.end() for found in begin.finditer(text)), default=0)
    part = CONTROL.split(text[start:], maxsplit=1)[0]
    return part if part.strip() else text


def one_line(text: str) -> str:
    """Return the beginning of a text, with white space collapsed."""
    line = " ".join(text[: 2 * SNIPPET_CHARACTERS].split())
    return line if len(line) <= SNIPPET_CHARACTERS else f"{line[:SNIPPET_CHARACTERS]}…"


def _means(values: NDArray[np.float64], rows: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return the [count] mean of each row's finite values; NaN for a row without one."""
    is_known = np.isfinite(values)
    known, values = rows[is_known], values[is_known]
    counts = np.bincount(known, minlength=count)
    sums = np.bincount(known, weights=values, minlength=count)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _whole(value: float) -> int:
    return int(value) if math.isfinite(value) else -1
