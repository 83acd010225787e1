"""The wire format: one immutable segment per put.

    header   64 bytes: magic, format version, number of arrays, sizes, crc32c of what follows it
    schema   JSON: number of rows, uids of prompts, and name, dtype, shape and place of each array
    table    crc32c of each array, [num_arrays] uint32
    arrays   little-endian, each aligned to 64 bytes

Arrays whose names begin with "#" belong to the rows: "#prompt" (index into the uids), "#session" and "#output" make
the keys, "#offsets" the lengths of all ragged columns, which are equal, and "#extras" is JSON. Nothing that is read can
run code, and nothing is allocated: arrays are views, whose bounds numpy checks.
"""

import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.data.batch import Batch, Column
from rl_core.data.columns import column_spec
from rl_core.data.ragged import Array, Ragged
from rl_core.data.row_keys import RowKeys
from rl_core.errors import DataError, RLError, SegmentError, ShapeError, UndeclaredColumnError, UnknownColumnError
from rl_core.files.durable import checksum

MAGIC = b"RLSEGMT\0"
FORMAT_VERSION = 1
ALIGNMENT = 64
COPY_BYTES = 1 << 19  # small enough to stay in the cache for its checksum
HEADER = struct.Struct("<8sIIQQI28x")
FLOATS = ("float16", "float32", "float64")
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), *FLOATS)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMS = 8

Bytes = NDArray[np.uint8]


class ArrayEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Location of an array: `place` is its first byte in the segment."""

    name: str
    dtype: str
    shape: list[int]
    place: int


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of a segment; `ragged` names the columns that share "#offsets"."""

    num_rows: int
    uids: list[str]
    ragged: list[str]
    arrays: list[ArrayEntry]


class SegmentPlan(NamedTuple):
    """A segment whose layout is known but which is not written yet."""

    schema: bytes
    sources: list[tuple[ArrayEntry, list[Array]]]
    size_bytes: int

    def as_bytes(self) -> bytes:
        """Write to new memory; faster than `write` for small segments."""
        arrays = [b"".join([part.tobytes() for part in parts]) for _, parts in self.sources]
        described = self.schema + np.asarray([checksum(array) for array in arrays], dtype="<u4").tobytes()
        pieces, place = [self._header(described), described], HEADER.size + len(described)
        for (entry, _), array in zip(self.sources, arrays, strict=True):
            pieces += (b"\0" * (entry.place - place), array)
            place = entry.place + len(array)
        pieces.append(b"\0" * (self.size_bytes - place))
        return b"".join(pieces)

    def write(self, target: memoryview | bytearray | Bytes) -> None:
        """Copy the arrays, then the header, into writable memory of at least `size_bytes`."""
        memory: Bytes = np.frombuffer(target, dtype=np.uint8)
        sums = [_copy(parts, memory[entry.place :]) for entry, parts in self.sources]
        described = self.schema + np.asarray(sums, dtype="<u4").tobytes()
        memory[HEADER.size : HEADER.size + len(described)] = np.frombuffer(described, dtype=np.uint8)
        memory[: HEADER.size] = np.frombuffer(self._header(described), dtype=np.uint8)

    def _header(self, described: bytes) -> bytes:
        num_arrays, schema_bytes = len(self.sources), len(self.schema)
        return HEADER.pack(MAGIC, FORMAT_VERSION, num_arrays, schema_bytes, self.size_bytes, checksum(described))


def plan_segment(batch: Batch) -> SegmentPlan:
    """Lay out a batch.

    Raises:
        DataError: A row's extras are not JSON.
    """
    keys = batch.keys.compact()
    arrays: dict[str, list[Array]] = {"#prompt": [keys.prompts], "#session": [keys.sessions], "#output": [keys.outputs]}
    if any(batch.extras):
        arrays["#extras"] = [np.frombuffer(_encode_extras(batch), dtype=np.uint8)]
    ragged = []
    for name in sorted(batch.names):
        column = batch[name]
        if isinstance(column, Ragged):
            arrays.setdefault("#offsets", [column.offsets])
            ragged.append(name)
            arrays[name] = list(column.runs()) or [column.values]
        else:
            arrays[name] = [column]
    entries = [_entry(name, parts) for name, parts in arrays.items()]
    draft = Schema(num_rows=len(batch), uids=list(keys.uids), ragged=ragged, arrays=entries)
    place = _aligned(HEADER.size + len(msgspec.json.encode(draft)) + 24 * len(entries))  # room for larger places
    for entry in entries:
        entry.place = place
        place = _aligned(place + _size_of(entry))
    return SegmentPlan(msgspec.json.encode(draft), list(zip(entries, arrays.values(), strict=True)), place)


def decode_segment(source: bytes | bytearray | memoryview | Bytes, *, is_verified: bool = False) -> Batch:
    """Read a batch as read-only views of a segment's memory.

    Args:
        source: The segment; the memory may be longer, because slots are reused.
        is_verified: The checksums have been checked already.

    Raises:
        SegmentError: The segment is torn or altered; names the column.
        UndeclaredColumnError: This process has not declared a column.
    """
    memory: memoryview = memoryview(source)  # type: ignore[arg-type]  # numpy 2 arrays are buffers
    schema, sums, size = _read_schema(memory)
    arrays: dict[str, Array] = {}
    end = 0
    try:
        for entry, expected in zip(schema.arrays, sums, strict=True):
            end = entry.place + _size_of(entry)
            if not is_verified and checksum(memory[entry.place : end]) != expected:
                raise SegmentError(
                    f"column {entry.name!r} of {_rows_of(schema)} has a wrong checksum: the segment was altered or "
                    "truncated. Generate these rows again."
                )
            arrays[entry.name] = _view(entry, source)
        if _aligned(end) != size:
            raise SegmentError(f"the header of a segment declares {size} bytes; its arrays end at {end}.")
        return _batch_of(schema, arrays)
    except SegmentError:
        raise
    except UnknownColumnError as error:  # unknown here: the segment may be intact
        raise UndeclaredColumnError(
            f"a segment of {_rows_of(schema)} cannot be read in this process: {error}"
        ) from error
    except (RLError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise SegmentError(f"a segment of {_rows_of(schema)} is inconsistent: {error}") from error


def segment_size(source: bytes | memoryview | Bytes) -> int:
    """Return the size of a segment in bytes, from its header and schema, without reading its arrays.

    Raises:
        SegmentError: The header or schema is torn or altered, or the segment is longer than the memory.
    """
    memory: memoryview = memoryview(source)  # type: ignore[arg-type]  # numpy 2 arrays are buffers
    return _read_schema(memory)[2]


def _read_schema(memory: memoryview) -> tuple[Schema, list[int], int]:
    """Read the schema, the arrays' checksums, and the size of the segment."""
    if len(memory) < HEADER.size:
        raise SegmentError(f"a segment must have at least {HEADER.size} bytes; found {len(memory)}.")
    magic, version, num_arrays, schema_bytes, size, expected = HEADER.unpack_from(memory)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise SegmentError(f"expected a segment of format {FORMAT_VERSION}; found magic {magic!r}, format {version}.")
    end = HEADER.size + schema_bytes + 4 * num_arrays
    if size > len(memory) or end > size:
        raise SegmentError(
            f"the header of a segment declares {size} bytes, {end} of them before its arrays; found {len(memory)} "
            "bytes."
        )
    described = memory[HEADER.size : end].tobytes()
    if checksum(described) != expected:
        raise SegmentError("the schema of a segment has a wrong checksum: the segment was altered or truncated.")
    try:
        schema = msgspec.json.decode(described[:schema_bytes], type=Schema)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SegmentError(f"the schema of a segment cannot be read: {error}.") from error
    return schema, np.frombuffer(described[schema_bytes:], dtype="<u4").tolist(), size


def _view(entry: ArrayEntry, source: Any) -> Array:
    count = math.prod(entry.shape)
    view: Array = np.frombuffer(source, dtype=DTYPES[entry.dtype], count=count, offset=entry.place)
    view.flags.writeable = False
    return view if len(entry.shape) == 1 else view.reshape(entry.shape)


def _batch_of(schema: Schema, arrays: dict[str, Array]) -> Batch:
    prompts, sessions, outputs = (arrays.pop(name) for name in ("#prompt", "#session", "#output"))
    if any(array.shape != (schema.num_rows,) or array.dtype != np.int32 for array in (prompts, sessions, outputs)):
        raise ShapeError(f"the keys must be [{schema.num_rows}] int32.")
    if schema.num_rows and min(int(array.min()) for array in (prompts, sessions, outputs)) < 0:
        raise DataError("a row key has a negative index.")
    if (schema.num_rows and int(prompts.max()) >= len(schema.uids)) or len(set(schema.uids)) != len(schema.uids):
        last = int(prompts.max(initial=-1))
        raise DataError(f"a row key refers to prompt {last} of {len(schema.uids)}, or a prompt appears twice.")
    keys = RowKeys(tuple(schema.uids), prompts, sessions, outputs)
    encoded = arrays.pop("#extras", None)
    extras = msgspec.json.decode(encoded.tobytes(), type=list[dict[str, Any]]) if encoded is not None else None
    offsets = arrays.pop("#offsets", None)
    if (set(schema.ragged) - arrays.keys()) or (schema.ragged and offsets is None):
        raise DataError(f"ragged columns {schema.ragged} lack values or offsets.")
    if offsets is not None and (offsets.shape != (schema.num_rows + 1,) or offsets.dtype != np.int64):
        raise ShapeError(f"the offsets must be [{schema.num_rows + 1}] int64.")
    ragged = {name: arrays.pop(name) for name in schema.ragged}
    columns: dict[str, Column] = {**arrays}
    if offsets is not None:
        columns |= Ragged.aligned(ragged, offsets)
    for name, column in columns.items():
        if column.dtype != (expected := column_spec(name).dtype):
            raise ShapeError(f"column {name!r} must have dtype {expected}; found {column.dtype}.")
    return Batch(keys, columns, extras=extras)


def _rows_of(schema: Schema) -> str:
    """Describe the rows, such as "32 rows of prompts 'p0' to 'p3'"."""
    if not schema.uids:
        return f"{schema.num_rows} rows"
    return f"{schema.num_rows} rows of prompts {schema.uids[0]!r} to {schema.uids[-1]!r}"


def _encode_extras(batch: Batch) -> bytes:
    try:
        return msgspec.json.encode(batch.extras)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        for key, extras in zip(batch.keys, batch.extras, strict=True):
            try:
                msgspec.json.encode(extras)
            except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
                raise DataError(f"extras of row {tuple(key)} must be JSON: {error}.") from error
        raise


def _entry(name: str, parts: list[Array]) -> ArrayEntry:
    shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
    dtype = NAMES.get(parts[0].dtype)
    if dtype is None or len(shape) > MAX_DIMS:
        raise DataError(
            f"column {name!r} must contain little-endian numbers or bools in at most {MAX_DIMS} dimensions; found "
            f"{parts[0].dtype} in {len(shape)}."
        )
    return ArrayEntry(name=name, dtype=dtype, shape=shape, place=0)


def _size_of(entry: ArrayEntry) -> int:
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _copy(parts: list[Array], target: Bytes) -> int:
    """Copy parts contiguously; return their crc32c."""
    total, place = 0, 0
    for source in _chunks(parts):
        copied = target[place : place + len(source)]
        copied[:] = source
        total = checksum(copied, total)
        place += len(source)
    return total


def _chunks(parts: list[Array]) -> Iterator[Bytes]:
    for part in parts:
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), COPY_BYTES):
            yield flat[start : start + COPY_BYTES]
