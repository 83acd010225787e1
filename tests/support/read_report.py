"""Read the data in a report's page, as a browser does."""

import base64
import gzip
import json
import struct
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_metrics.report.packing import DTYPES


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return header and columns of packed bytes."""
    content = gzip.decompress(packed)
    (length,) = struct.unpack_from("<I", content)
    described = json.loads(content[4 : 4 + length])
    start, columns = 4 + length, {}
    for place in described["columns"]:
        dtype, count = DTYPES[place["kind"]], place["count"]
        planes = np.frombuffer(content, np.uint8, count * dtype.itemsize, start).reshape(dtype.itemsize, count)
        columns[place["name"]] = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
        start += count * dtype.itemsize
    return described["header"], columns


class _Scripts(HTMLParser):
    """The scripts of a page: (attributes, text)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self._is_within = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_within = tag == "script"
        if self._is_within:
            self.found.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._is_within:
            attributes, text = self.found[-1]
            self.found[-1] = (attributes, text + data)

    def handle_endtag(self, _tag: str) -> None:
        self._is_within = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRun:
    """One run of a report.

    Attributes:
        header: Header of the run.
        columns: Columns of its charts.
        index_header: Header of its trajectories.
        index: Columns of its trajectories.
        texts: Packed texts of each trajectory.
        tokens: Header and columns of each chunk.
        samples_header: Header of its validations' samples.
        samples: Columns of the samples.
        sample_texts: Packed texts of each sample.
    """

    header: dict[str, Any]
    columns: dict[str, Any]
    index_header: dict[str, Any]
    index: dict[str, Any]
    texts: list[list[Any]]
    tokens: list[tuple[dict[str, Any], dict[str, Any]]]
    samples_header: dict[str, Any]
    samples: dict[str, Any]
    sample_texts: list[list[Any]]


def scripts_of(page: str) -> list[tuple[dict[str, str | None], str]]:
    """Return the attributes and text of each script of a page, in order."""
    parser = _Scripts()
    parser.feed(page)
    return parser.found


def read_report(file: Path) -> list[ReadRun]:
    """Return the runs of a report."""
    parts = {attributes["id"]: text for attributes, text in scripts_of(file.read_text()) if "id" in attributes}
    manifest = json.loads(parts["manifest"])
    return [_read_run(name, parts) for name in manifest["runs"]]


def _read_run(name: str, parts: dict[str | None, str]) -> ReadRun:
    header, columns = unpack(base64.b64decode(parts[name]))
    index_header, index = unpack(base64.b64decode(parts[header["index"]]))
    chunks = index_header["chunks"]
    samples_header, samples = unpack(base64.b64decode(parts[header["generations"]]))
    return ReadRun(
        header=header,
        columns=columns,
        index_header=index_header,
        index=index,
        texts=_texts(chunks, parts),
        tokens=[unpack(base64.b64decode(parts[chunk["tokens"]])) for chunk in chunks],
        samples_header=samples_header,
        samples=samples,
        sample_texts=_texts(samples_header["chunks"], parts),
    )


def _texts(chunks: list[dict[str, Any]], parts: dict[str | None, str]) -> list[list[Any]]:
    return [row for chunk in chunks for row in unpack(base64.b64decode(parts[chunk["texts"]]))[0]["rows"]]
