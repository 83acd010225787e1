"""Child script that reads Parquet and Arrow files as a trainer would, and reports problems."""

import json
import sys
from collections.abc import Iterator
from typing import Any

MAX_ROWS = 1 << 24
MAX_CELL_BYTES = 1 << 26
MAX_BATCH_VALUES = 1 << 24
MAX_TOTAL_BYTES = 1 << 34
BATCH_ROWS = 256
THRIFT_STRING_BYTES = 1 << 24
THRIFT_ITEMS = 1 << 20


def main() -> None:
    """Read `{"files": [...]}` from standard input; print "passed" or the problem."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    num_rows = num_bytes = 0
    try:
        for file in json.load(sys.stdin)["files"]:
            for batch in _batches(file):
                batch.validate(full=True)  # checks offsets and UTF-8
                num_rows += batch.num_rows
                num_bytes += _checked_bytes(batch)
                if num_rows > MAX_ROWS:
                    raise ValueError(f"it has more than {MAX_ROWS} rows")
                if num_bytes > MAX_TOTAL_BYTES:
                    raise ValueError(f"it needs more than {MAX_TOTAL_BYTES} bytes in memory")
        sys.stdout.write("passed")
    except MemoryError:
        sys.stdout.write("it needs more memory than the trial read allows")
    except Exception as error:  # pyarrow raises many types
        sys.stdout.write(f"{error}".replace("\n", " ") or type(error).__name__)


def _batches(file: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.endswith(".parquet"):
        with pa.memory_map(file) as mapped, pa.ipc.open_stream(mapped) as stream:
            for whole in stream:
                if whole.num_rows > MAX_ROWS:
                    raise ValueError(f"it has more than {MAX_ROWS} rows")
                yield from (whole.slice(row, BATCH_ROWS) for row in range(0, whole.num_rows, BATCH_ROWS))
        return
    limits = {"thrift_string_size_limit": THRIFT_STRING_BYTES, "thrift_container_size_limit": THRIFT_ITEMS}
    with pq.ParquetFile(file, memory_map=True, **limits) as opened:
        if opened.metadata.num_rows > MAX_ROWS:
            raise ValueError(f"it must have at most {MAX_ROWS} rows; it has {opened.metadata.num_rows}")
        yield from opened.iter_batches(batch_size=BATCH_ROWS, use_threads=False)


def _checked_bytes(batch: Any) -> int:
    """Return the size in bytes of some rows, each stored separately."""
    num_values = num_bytes = 0
    waiting = list(batch.columns)
    while waiting:
        array, kind = waiting.pop(), None
        if hasattr(array.type, "storage_type"):
            array = array.storage
        if hasattr(array, "dictionary_decode"):
            array = array.dictionary_decode()
        num_values += len(array)
        if num_values > MAX_BATCH_VALUES:
            raise ValueError(f"it has more than {MAX_BATCH_VALUES} values in {batch.num_rows} rows")
        kind = array.type
        if hasattr(kind, "fields") and hasattr(array, "flatten") and kind.num_fields and str(kind).startswith("struct"):
            waiting += [array.field(i) for i in range(kind.num_fields)]
        elif hasattr(kind, "value_type") and hasattr(array, "flatten"):
            waiting.append(array.flatten())
        else:
            num_bytes += array.nbytes
    for column in batch.columns:
        if column.nbytes > MAX_CELL_BYTES and any(
            column.slice(i, 1).nbytes > MAX_CELL_BYTES for i in range(len(column))
        ):
            raise ValueError(f"it has a cell of more than {MAX_CELL_BYTES} bytes")
    return num_bytes


if __name__ == "__main__":
    main()
