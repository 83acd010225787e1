"""Validation samples in the page's format: one index, and texts in chunks."""

from array import array
from collections.abc import Sequence
from typing import Any

from rl_metrics.report.blobs import BlobSink
from rl_metrics.report.packing import Kind, pack
from rl_metrics.report.rollout_blobs import add_parts, one_line, short_name
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
    "source": "i32",
    "finish": "i32",
    "failure": "i32",
}
"""Columns of the index; those without numbers are codes of the header's names, and failure 0 is none."""


def pack_generations(tables: Sequence[GenerationTable], sink: BlobSink) -> str:
    """Pack the samples by step and return the name of the index.

    Args:
        tables: Tables of the validations.
        sink: Destination of the packed parts.
    """
    rows = [(table, sample) for table in sorted(tables, key=lambda one: one.step) for sample in table.samples]
    kept = rows[-MAX_SAMPLES:]
    names: dict[str, dict[str, int]] = {name: {} for name in ("table", "problem", "source", "finish")}
    names["failure"] = {"": 0}
    parts: dict[str, array[float]] = {}
    prompts: list[str] = []
    index: dict[str, array[float]] = {name: array("d") for name in INDEX_KINDS}
    chunks: list[dict[str, Any]] = []
    texts: list[list[Any]] = []
    num_characters = 0
    for place, (table, sample) in enumerate(kept):
        named = {"table": table.name, "problem": sample.prompt_uid}
        grouped = {"source": sample.data_source, "finish": sample.finish, "failure": sample.failure or ""}
        codes = named | {name: short_name(text) for name, text in grouped.items()}
        numbers = {"step": _near(table.step), "score": sample.score, "version": _near(sample.policy_version[1])}
        numbers |= {name: names[name].setdefault(text, len(names[name])) for name, text in codes.items()}
        for name, value in numbers.items():
            index[name].append(value)
        if len(names["problem"]) > len(prompts):
            prompts.append(one_line(sample.input))
        add_parts(parts, sample.components, count=place)
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
        "parts": list(parts),
        "prompts": prompts,
    }
    columns: dict[str, tuple[Kind, Any]] = {name: (kind, index[name]) for name, kind in INDEX_KINDS.items()}
    columns |= {f"part{number}": ("f32", values) for number, values in enumerate(parts.values())}
    return sink(pack(header, columns))


def _near(number: int) -> int:
    """Clip a number, which may have any number of digits, to the range of "i32"."""
    return min(max(number, -(2**31)), 2**31 - 1)
