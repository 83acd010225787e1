"""A script of `run_trial`: reads Parquet and Arrow files as a trainer would, within bounds on what they unpack to."""

from collections.abc import Iterator
from typing import Any

MAX_ROWS = 1 << 24
MAX_CELL_BYTES = 1 << 26
MAX_BATCH_VALUES = 1 << 24
MAX_TOTAL_BYTES = 1 << 34
BATCH_ROWS = 256
THRIFT_LIMITS = {"thrift_string_size_limit": 1 << 24, "thrift_container_size_limit": 1 << 20}


def main(files: list[str]) -> None:
    """Decode all rows.

    Raises:
        ValueError: A file is invalid or too large; pyarrow raises other types too.
    """
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    num_rows = num_bytes = 0
    for file in files:
        for batch in _batches(file):
            batch.validate(full=True)  # checks offsets and UTF-8
            num_rows += batch.num_rows
            num_bytes += _unpacked_bytes(batch)
            _refuse_more(num_rows, MAX_ROWS, "rows")
            _refuse_more(num_bytes, MAX_TOTAL_BYTES, "bytes in memory")


def _batches(file: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.endswith(".parquet"):
        with pq.ParquetFile(file, memory_map=True, **THRIFT_LIMITS) as opened:
            _refuse_more(opened.metadata.num_rows, MAX_ROWS, "rows")
            yield from opened.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
        return
    with pa.memory_map(file) as mapped, pa.ipc.open_stream(mapped) as stream:
        for whole in stream:
            _refuse_more(whole.num_rows, MAX_ROWS, "rows")
            yield from (whole.slice(row, BATCH_ROWS) for row in range(0, whole.num_rows, BATCH_ROWS))


def _unpacked_bytes(batch: Any) -> int:
    """Return the size in bytes of some rows, each stored separately."""
    num_values = num_bytes = 0
    waiting = list(batch.columns)
    while waiting:
        array = waiting.pop()
        array = getattr(array, "storage", array)  # of an extension type
        if hasattr(array, "dictionary_decode"):
            array = array.dictionary_decode()
        num_values += len(array)
        _refuse_more(num_values, MAX_BATCH_VALUES, f"values in {batch.num_rows} rows")
        if hasattr(array, "flatten") and not hasattr(array, "items"):  # a list or a struct, but not a map
            parts = array.flatten()
            waiting += parts if isinstance(parts, list) else [parts]
        else:
            num_bytes += array.nbytes
    for column in batch.columns:
        if column.nbytes > MAX_CELL_BYTES:
            largest = max(column.slice(row, 1).nbytes for row in range(len(column)))
            _refuse_more(largest, MAX_CELL_BYTES, "bytes in a cell")
    return num_bytes


def _refuse_more(found: int, most: int, what: str) -> None:
    if found > most:
        raise ValueError(f"it has more than {most} {what}")
