"""Rows of a parquet file, read with pyarrow."""

from collections.abc import Iterator
from pathlib import Path

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError
from rl_core.files import try_arrow_files

BATCH_ROWS = 256
"""Rows per batch. The trial reserves memory for this many."""


class ParquetTable:
    """A parquet file as an Arrow table; a row becomes Python objects when it is read."""

    def __init__(self, path: Path) -> None:
        """Read the table.

        Raises:
            DataError: pyarrow cannot read the file, or it exceeds the memory limit.
            MissingExtraError: pyarrow is not installed.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingExtraError(f"{path}: parquet files need pyarrow. Run: pip install pyarrow") from error
        try_arrow_files([path])
        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable parquet file ({error}). Write it again.") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> dict[str, Json]:
        """Return a row by its index, from 0."""
        rows: list[dict[str, Json]] = self._table.slice(row, 1).to_pylist()
        return rows[0]

    def __iter__(self) -> Iterator[dict[str, Json]]:
        for batch in self._table.to_batches(max_chunksize=BATCH_ROWS):
            yield from batch.to_pylist()
