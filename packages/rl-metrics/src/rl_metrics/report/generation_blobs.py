"""Validation samples in the page's format: one index, and texts in chunks."""

from array import array
from collections.abc import Sequence
from typing import Any

from rl_metrics.report.blobs import BlobSink
from rl_metrics.report.packing import Kind, pack
from rl_metrics.run_files.json_lines import json_text
from rl_metrics.trackers.jsonl import GenerationTable

CHUNK_SAMPLES = 256
CHUNK_CHARACTERS = 1 << 21
"""A chunk ends with the sample that reaches one of these limits."""

MAX_SAMPLES = 20_000
"""Maximum number of samples of a run in a report; the newest steps are kept."""

INDEX_KINDS: dict[str, Kind] = {
    "step": "i32",
    "table": "i32",
    "problem": "i32",
    "score": "f32",
    "version": "i32",
    "failed": "u8",
}
"""Columns of the index; tables and problems are codes of the header's names."""


def pack_generations(tables: Sequence[GenerationTable], sink: BlobSink) -> str:
    """Pack the samples by step and return the name of the index.

    Args:
        tables: Tables of the validations.
        sink: Destination of the packed parts.
    """
    rows = [(table, sample) for table in sorted(tables, key=lambda one: one.step) for sample in table.samples]
    kept = rows[-MAX_SAMPLES:]
    names: dict[str, dict[str, int]] = {"table": {}, "problem": {}}
    index: dict[str, array[float]] = {name: array("d") for name in INDEX_KINDS}
    chunks: list[dict[str, Any]] = []
    texts: list[list[Any]] = []
    num_characters = 0
    for place, (table, sample) in enumerate(kept):
        table_code = names["table"].setdefault(table.name, len(names["table"]))
        problem = names["problem"].setdefault(sample.prompt_uid, len(names["problem"]))
        version = _near(sample.policy_version[1])
        values = (_near(table.step), table_code, problem, sample.score, version, sample.failure is not None)
        for column, value in zip(index.values(), values, strict=True):
            column.append(value)
        texts.append([sample.input, sample.output, json_text(sample.ground_truth), sample.prompt_uid, sample.source,
                      sample.failure, list(sample.policy_version), dict(sample.components)])  # fmt: skip
        num_characters += len(sample.input) + len(sample.output) + len(sample.failure or "")
        if len(texts) >= CHUNK_SAMPLES or num_characters >= CHUNK_CHARACTERS or place == len(kept) - 1:
            chunks.append({"first": place + 1 - len(texts), "texts": sink(pack({"rows": texts}, {}))})
            texts, num_characters = [], 0
    header = {
        "chunks": chunks,
        "recorded": len(rows),
        "names": {name: list(codes) for name, codes in names.items()},
    }
    return sink(pack(header, {name: (kind, index[name]) for name, kind in INDEX_KINDS.items()}))


def _near(number: int) -> int:
    """Clip a number, which may have any number of digits, to the range of "i32"."""
    return min(max(number, -(2**31)), 2**31 - 1)
