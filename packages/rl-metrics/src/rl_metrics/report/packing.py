"""The report's data format, a JSON header and typed columns, compressed; and where it is written."""

import base64
import gzip
import json
import struct
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_metrics.run_files.json_lines import as_plain

Kind = Literal["f32", "f64", "i32", "u8"]
"""Type of a column.

"f32" keeps integers, and about 4 significant digits of other numbers; a column with too large numbers is packed as
"f64". Numbers outside the range of "i32" are clipped.
"""

KEPT_BITS = 13
"""Kept mantissa bits of a float32's 23: an error of at most 2**-14, and two of four bytes that compress well."""

LEAST_WHOLE = 2.0**13
"""Numbers from here on are rounded to integers, which `KEPT_BITS` could not all represent."""

MOST_WHOLE = 2.0**24
"""A float32 represents all integers up to here."""

LEVEL = 6

BlobSink = Callable[[bytes], str]
"""Stores a packed part and returns its name, which is equal for equal contents."""

DTYPES: Mapping[Kind, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
    "i32": np.dtype("<i4"),
    "u8": np.dtype("u1"),
}


def pack(header: Mapping[str, Any], columns: Mapping[str, tuple[Kind, ArrayLike]]) -> bytes:
    """Return the gzip of header length (uint32), header and columns. Equal inputs produce equal bytes.

    A column's bytes are sorted by their position in the number (all first bytes, then all second ones), which
    compresses better. `unpack` in assets/packed.js is the inverse.

    Args:
        header: JSON values; texts may contain lone surrogates.
        columns: Numbers by name; NaN is allowed in "f32" and "f64".
    """
    places: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, (kind, values) in columns.items():
        numbers = _numbers(kind, values)
        kept = "f64" if numbers.dtype == DTYPES["f64"] else kind
        places.append({"name": name, "kind": kept, "count": len(numbers)})
        parts.append(numbers.view(np.uint8).reshape(len(numbers), numbers.dtype.itemsize).T.tobytes())
    text = json.dumps({"header": as_plain(header), "columns": places}, allow_nan=False, separators=(",", ":")).encode()
    return gzip.compress(b"".join((struct.pack("<I", len(text)), text, *parts)), LEVEL, mtime=0)


def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest values with `KEPT_BITS`, or integers from `LEAST_WHOLE` on; non-finite ones are NaN.

    The order of values is preserved. `asKept` in assets/packed.js does the same.
    """
    cut = 23 - KEPT_BITS
    is_small = np.abs(values) < LEAST_WHOLE
    bits = np.where(is_small, values, 0.0).astype(np.float32).view(np.uint32)
    near = ((bits + np.uint32(1 << (cut - 1))) & np.uint32(~((1 << cut) - 1) & 0xFFFFFFFF)).view(np.float32)
    whole = np.rint(np.where(np.isfinite(values), values, np.nan))
    return np.where(is_small, near.astype(np.float64), whole)


def _numbers(kind: Kind, values: ArrayLike) -> NDArray[Any]:
    if kind == "f32":
        near = rounded(np.asarray(values, np.float64))
        is_large = bool((np.abs(near) > MOST_WHOLE).any())
        return np.ascontiguousarray(near, DTYPES["f64" if is_large else "f32"])
    if kind == "f64":
        return np.ascontiguousarray(values, DTYPES[kind])
    limits = np.iinfo(DTYPES[kind])
    whole = np.nan_to_num(np.asarray(values, np.float64), nan=0.0)
    return np.ascontiguousarray(np.clip(whole, limits.min, limits.max).astype(DTYPES[kind]))


def page_blobs(page: BinaryIO) -> BlobSink:
    """Return a sink that writes each part once into a page, as a script element that browsers do not run.

    Args:
        page: Page open for writing, within its body.
    """
    written: set[str] = set()

    def put(content: bytes) -> str:
        name = blob_name(content)
        if name not in written:
            written.add(name)
            page.write(b'<script type="text/plain" id="' + name.encode() + b'">')
            page.write(base64.b64encode(content) + b"</script>\n")
        return name

    return put


def folder_blobs(folder: Path, names: set[str]) -> BlobSink:
    """Return a sink that writes each part to a file, unless it exists.

    Args:
        folder: Existing folder of the files.
        names: Set that receives the names of the parts.
    """

    def put(content: bytes) -> str:
        name = blob_name(content)
        names.add(name)
        file = folder / name
        if not file.exists():
            part = file.with_suffix(".part")
            part.write_bytes(content)
            part.replace(file)
        return name

    return put


def blob_name(content: bytes) -> str:
    """Return a part's name such as "b3f0c9…", a digest by which a page recognizes parts that it has."""
    return "b" + blake2b(content, digest_size=10).hexdigest()
