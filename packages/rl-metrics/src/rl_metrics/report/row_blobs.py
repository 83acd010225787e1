"""Trajectories and validation samples in the page's format: one index each, and texts and tokens in chunks."""

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rl_core.images import ImageStore
from rl_metrics.report.packing import BlobSink, Kind, pack
from rl_metrics.report.thumbnails import Thumbnails
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import as_plain, json_text
from rl_metrics.run_files.rollout_log import FLOAT_COLUMNS, RolloutRow
from rl_metrics.trackers.jsonl import GenerationTable

Row = TypeVar("Row")

CHUNK_ROWS = 512
CHUNK_SAMPLES = 256
CHUNK_TOKENS = 1 << 15
CHUNK_CHARACTERS = 1 << 21
"""A chunk ends with the trajectory or sample that reaches one of these limits."""

MAX_SAMPLES = 20_000
"""Maximum number of samples of a run in a report; the newest steps are kept."""

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

ROLLOUT_COLUMNS = (
    *("step", "reward", "length", "source", "problem", "finish", "failure", "version", "staleness", "mismatch"),
    *("entropy", "advantage", "seconds"),
)
SAMPLE_COLUMNS = ("step", "table", "problem", "score", "version", "source", "finish", "failure")
"""Columns of an index; those without numbers are codes of the header's names, and failure 0 is none."""

FRACTIONS = frozenset({"reward", "mismatch", "entropy", "advantage", "seconds", "score"})
"""Columns of an index whose numbers are not integers."""


class _Index:
    """Columns of trajectories or samples, for filters."""

    def __init__(self, columns: Sequence[str], *names: str) -> None:
        """Create an index with these columns; those with these names have codes of names."""
        self._codes: dict[str, dict[str, int]] = {name: {} for name in names}
        self._codes["failure"][""] = 0  # none
        self._parts: dict[str, array[float]] = {}
        self._count = 0
        self.columns: dict[str, array[float]] = {name: array("d") for name in columns}

    def add(self, numbers: Mapping[str, float], names: Mapping[str, str], components: Mapping[str, float]) -> bool:
        """Add a row, and return whether its problem is new; components fill the first `MAX_PARTS` parts."""
        num_problems = len(self._codes["problem"])
        codes = {name: self._codes[name].setdefault(text, len(self._codes[name])) for name, text in names.items()}
        for name, value in (*numbers.items(), *codes.items()):
            self.columns[name].append(value)
        parts = {short_name(name): value for name, value in components.items()}
        for name in parts:
            if len(self._parts) < MAX_PARTS and name not in self._parts:
                self._parts[name] = array("d", (math.nan,) * self._count)
        for name, values in self._parts.items():
            values.append(parts.get(name, math.nan))
        self._count += 1
        return len(self._codes["problem"]) > num_problems

    def pack(self, header: Mapping[str, Any]) -> bytes:
        """Return the packed index with a header, to which names and parts are added."""
        names = {name: list(codes) for name, codes in self._codes.items()}
        columns: dict[str, tuple[Kind, Any]] = {
            name: ("f32" if name in FRACTIONS else "i32", values) for name, values in self.columns.items()
        }
        columns |= {f"part{number}": ("f32", values) for number, values in enumerate(self._parts.values())}
        return pack({**header, "names": names, "parts": list(self._parts)}, columns)


def _chunked(
    rows: Iterable[Row], *, max_rows: int, sizes: Callable[[Row], tuple[int, int]]
) -> Iterator[tuple[int, list[Row]]]:
    """Yield chunks of rows and the index of their first row; `sizes` returns numbers of tokens and characters."""
    first, chunk, num_tokens, num_characters = 0, list[Row](), 0, 0
    for row in rows:
        chunk.append(row)
        row_tokens, row_characters = sizes(row)
        num_tokens, num_characters = num_tokens + row_tokens, num_characters + row_characters
        if len(chunk) >= max_rows or num_tokens >= CHUNK_TOKENS or num_characters >= CHUNK_CHARACTERS:
            yield first, chunk
            first, chunk, num_tokens, num_characters = first + len(chunk), [], 0, 0
    if chunk:
        yield first, chunk


def pack_rollouts(
    rows: Iterable[RolloutRow], sink: BlobSink, *, images: ImageStore, num_recorded: int | None = None
) -> str:
    """Pack trajectories, with only one chunk in memory, and return the name of the index.

    Args:
        rows: Trajectories, ordered by step.
        sink: Destination of the packed parts.
        images: The run's images.
        num_recorded: Number of recorded trajectories, including omitted ones; None if none were omitted.
    """
    thumbnails = Thumbnails(images, sink)
    index = _Index(ROLLOUT_COLUMNS, "source", "problem", "finish", "failure")
    chunks: list[dict[str, Any]] = []
    prompts: list[str] = []
    responses: list[str] = []
    for first, chunk in _chunked(rows, max_rows=CHUNK_ROWS, sizes=_sizes):
        for row in chunk:
            times = [value for name, value in row.timings.items() if name.endswith("_s") and math.isfinite(value)]
            numbers = {"step": row.step, "reward": row.reward, "length": len(row.tokens), "seconds": sum(times)}
            names = {
                "source": row.source or UNNAMED,
                "problem": row.problem or row.prompt_uid,
                "finish": row.finish or UNNAMED,
                "failure": row.failure or "",
            }
            short = {name: short_name(text) for name, text in names.items()}
            if index.add(numbers | {"version": row.policy_version}, short, row.components):
                prompts.append(_last_part(row.prompt, ASKED)[:SEEN_CHARACTERS])
            responses.append(one_line(_last_part(row.response, ANSWERED)))
        texts = [_texts(row, thumbnails) for row in chunk]
        measures, tokens = _pack_tokens(chunk)
        for name, values in measures.items():
            index.columns[name].extend(values.tolist())
        chunks.append({"first": first, "texts": sink(pack({"rows": texts}, {})), "tokens": sink(tokens)})
    recorded = len(responses) if num_recorded is None else num_recorded
    header = {"chunks": chunks, "recorded": recorded, "prompts": _told_apart(prompts), "responses": responses}
    return sink(index.pack(header))


def _sizes(row: RolloutRow) -> tuple[int, int]:
    texts = (row.prompt, row.response, row.failure or "", str(row.extras), str(row.turns))
    return len(row.tokens), sum(map(len, texts))


def _texts(row: RolloutRow, thumbnails: Thumbnails) -> list[Any]:
    return [
        *(row.prompt, row.response, as_plain(row.ground_truth)),
        *(row.prompt_uid, row.session, row.output, row.time),
        *(row.failure, dict(row.components), dict(row.timings), dict(row.extras), row.turns),
        [thumbnails.part(image.digest) for image in row.images],
    ]


def _pack_tokens(rows: Sequence[RolloutRow]) -> tuple[dict[str, NDArray[np.float64]], bytes]:
    """Return [rows] measures over each trajectory's sampled tokens, NaN if unknown, and the packed tokens."""
    lengths = [len(row.tokens) for row in rows]
    codes_of: dict[tuple[str, float], int] = {}
    pairs = (
        pair
        for row, count in zip(rows, lengths, strict=True)
        for pair in zip(row.tokens, row.columns.get("token_ids") or (-1.0,) * count, strict=True)
    )
    codes = [codes_of.setdefault(pair, len(codes_of)) for pair in pairs]
    mask = np.array([is_sampled for row in rows for is_sampled in row.mask], dtype=bool)
    column = {
        name: np.array(
            [value for row in rows for value in row.columns.get(name) or (math.nan,) * len(row.tokens)], np.float64
        )
        for name in ("versions", *FLOAT_COLUMNS)
    }
    header = {
        "tokens": [token for token, _ in codes_of],
        "ids": [int(token_id) if math.isfinite(token_id) else -1 for _, token_id in codes_of],
    }
    columns: dict[str, tuple[Kind, Any]] = {"lengths": ("i32", lengths), "codes": ("i32", codes), "mask": ("u8", mask)}
    columns |= {name: ("f32", values) for name, values in column.items() if not np.isnan(values).all()}
    row_of = np.repeat(np.arange(len(rows)), lengths)[mask]
    sampled = {name: values[mask] for name, values in column.items()}
    oldest = np.full(len(rows), np.inf)
    np.fmin.at(oldest, row_of, sampled["versions"])
    staleness = np.array([row.policy_version for row in rows], np.float64) - oldest
    rollout, policy = (np.exp(np.minimum(sampled[name], 0.0)) for name in ("rollout_logprobs", "policy_logprobs"))
    measures = {
        "staleness": np.where(np.isfinite(staleness), staleness, UNKNOWN),
        "mismatch": _means(np.abs(policy - rollout), row_of, len(rows)),
        "entropy": _means(sampled["entropy"], row_of, len(rows)),
        "advantage": _means(sampled["advantages"], row_of, len(rows)),
    }
    return measures, pack(header, columns)


def pack_generations(tables: Sequence[GenerationTable], sink: BlobSink, *, images: ImageStore) -> str:
    """Pack the samples by step and return the name of the index.

    Args:
        tables: Tables of the validations.
        sink: Destination of the packed parts.
        images: The run's images.
    """
    thumbnails = Thumbnails(images, sink)
    rows = [(table, sample) for table in sorted(tables, key=lambda table: table.step) for sample in table.samples]
    index = _Index(SAMPLE_COLUMNS, "table", "problem", "source", "finish", "failure")
    chunks: list[dict[str, Any]] = []
    prompts: list[str] = []
    for first, chunk in _chunked(rows[-MAX_SAMPLES:], max_rows=CHUNK_SAMPLES, sizes=_sample_sizes):
        texts = []
        for table, sample in chunk:
            numbers = {"step": _near(table.step), "score": sample.score, "version": _near(sample.policy_version[1])}
            grouped = {"source": sample.data_source, "finish": sample.finish, "failure": sample.failure or ""}
            names = {name: short_name(text) for name, text in grouped.items()}
            if index.add(numbers, names | {"table": table.name, "problem": sample.prompt_uid}, sample.components):
                prompts.append(one_line(sample.input))
            texts.append([sample.input, sample.output, json_text(sample.ground_truth), sample.prompt_uid, sample.source,
                          sample.failure, list(sample.policy_version), dict(sample.components),
                          list(map(thumbnails.part, sample.images))])  # fmt: skip
        chunks.append({"first": first, "texts": sink(pack({"rows": texts}, {}))})
    return sink(index.pack({"chunks": chunks, "recorded": len(rows), "prompts": prompts}))


def _sample_sizes(row: tuple[GenerationTable, GenerationSample]) -> tuple[int, int]:
    _, sample = row
    return 0, len(sample.input) + len(sample.output) + len(sample.failure or "")


def _near(number: int) -> int:
    """Clip a number, which may have any number of digits, to the range of "i32"."""
    return min(max(number, -(2**31)), 2**31 - 1)


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
