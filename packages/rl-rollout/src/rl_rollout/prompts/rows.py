"""Rows of the user's files: JSONL, parquet, and Hugging Face datasets on disk."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError
from rl_core.files import count_values, open_plain, read_json_object, try_arrow_files
from rl_core.record_fields import converts_arguments

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


STATE = "state.json"
MAX_FILES = 4096


def is_hf_dataset(folder: Path) -> bool:
    """Return True for a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / STATE).is_file() or (folder / "dataset_dict.json").is_file()


def read_hf_dataset(path: Path) -> Sequence[dict[str, Json]]:
    """Memory-map a saved dataset. Rows stay on disk until they are read.

    Raises:
        DataError: The folder holds several splits, or `datasets` cannot read it.
        MissingExtraError: `datasets` is not installed.
    """
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if is_hf_dataset(child))
        raise DataError(f"{path} holds several splits: {', '.join(splits)}. Give one, such as {path / splits[0]}.")
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"{path}: folders of Hugging Face datasets need `datasets`. "
            "Install rl-rollout[datasets] as the README says."
        ) from error
    try_arrow_files(_arrow_files(path))
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises many types for a damaged folder
        raise DataError(f"{path}: not a readable dataset ({type(error).__name__}: {error}). Save it again.") from error
    if _has_images(found.features, path):
        return _ArrowRows(found.with_format("arrow"))
    return found.with_format(None)  # type: ignore[no-any-return]


class _ArrowRows(Sequence[dict[str, Json]]):
    """Rows of a dataset as they are stored: an image is its bytes and path, which nothing opens or decodes."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: Any) -> Any:
        (found,) = self._dataset[row : row + 1].to_pylist()
        return found

    def __iter__(self) -> Iterator[dict[str, Json]]:
        return (row for table in self._dataset.iter(BATCH_ROWS) for row in table.to_pylist())


def _arrow_files(folder: Path) -> list[Path]:
    """Return the files that a saved dataset lists. All of its files must be plain and of bounded size."""
    state = read_json_object(folder / STATE)
    if (folder / "dataset_info.json").exists():
        read_json_object(folder / "dataset_info.json")
    listed = state.get("_data_files")
    listed = listed if isinstance(listed, list) else []
    names = [one.get("filename") if isinstance(one, dict) else None for one in listed]
    if not 1 <= len(names) <= MAX_FILES or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise DataError(f"{folder / STATE} must list 1 to {MAX_FILES} files in its own folder. Save the dataset again.")
    return [folder / str(name) for name in names]


def _has_images(features: Any, path: Path) -> bool:
    """Return True if a column has images. Refuse other media, for which `datasets` opens files or URLs.

    Raises:
        DataError: A column has audio or video.
    """
    waiting, has_images = [features], False
    while waiting:
        feature = waiting.pop()
        if type(feature).__name__ == "Image":
            has_images = True
        elif hasattr(feature, "decode_example") and hasattr(feature, "decode"):
            raise DataError(
                f"{path} must have columns of text, numbers, images and lists; found {type(feature).__name__}."
            )
        elif isinstance(feature, dict):
            waiting += feature.values()
        elif isinstance(feature, list | tuple):
            waiting += feature
        elif hasattr(feature, "feature"):
            waiting.append(feature.feature)
    return has_images


EXTENSIONS = (".parquet", ".jsonl")
MAX_ROWS = 1 << 24
MAX_FILE_BYTES = 1 << 34
MAX_LINE_BYTES = 1 << 26
MAX_LINE_VALUES = 1 << 20

RowTable = Sequence[dict[str, Json]] | ParquetTable
"""Rows by index from 0, also iterable in order."""


class Rows:
    """The rows of one file."""

    def __init__(self, path: Path, rows: RowTable, *, lines: Sequence[int] | None = None) -> None:
        """Store the rows that a library read.

        Args:
            path: The file or folder as the user named it.
            rows: The rows by index from 0, also iterable in order.
            lines: Line number of each row, from 1, counting blank lines. None if the file has no lines.
        """
        self.path = path
        self._rows = rows
        self._lines = lines

    def __repr__(self) -> str:
        return f"Rows({len(self)} of {self.path})"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Json]:
        """Return a row by its index, from 0.

        Raises:
            DataError: The row has a value that Python cannot represent.
        """
        with self._readable():
            return self._rows[row]

    def __iter__(self) -> Iterator[dict[str, Json]]:
        with self._readable():
            yield from self._rows

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # libraries raise many types, for example for dates beyond the year 9999
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{self.path}: a row has a value that cannot be read ({reason}). Repair it.") from error

    def locate(self, row: int) -> str:
        """Describe a row's location for messages. Rows and lines are counted from 1."""
        return f"{self.path}, row {row + 1}" if self._lines is None else f"{self.path}, line {self._lines[row]}"


def read_jsonl(path: Path) -> Rows:
    """Read and parse a whole JSON Lines file: one object per line, blank lines skipped.

    Raises:
        DataError: A line is not UTF-8, not JSON, or not an object.
    """
    rows: list[dict[str, Json]] = []
    lines: list[int] = []
    with open_plain(path) as (file, size):
        if size > MAX_FILE_BYTES:
            raise DataError(f"{path} must have at most {MAX_FILE_BYTES} bytes; it has {size}. Split it.")
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if line.strip():
                rows.append(_parse_line(line, where=f"{path}, line {number}"))
                lines.append(number)
            if len(rows) > MAX_ROWS:
                raise DataError(f"{path} must have at most {MAX_ROWS} rows. Split it.")
    return Rows(path, rows, lines=lines)


@converts_arguments
def open_rows(path: Path) -> Rows:
    """Open a file by its extension, or a folder that `datasets` saved.

    Raises:
        DataError: The file is missing, empty, unreadable, or of an unknown kind.
        MissingExtraError: The library for this kind is not installed.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist. Give the path of a {' or '.join(EXTENSIONS)} file.")
    if path.is_dir():
        if not is_hf_dataset(path):
            raise DataError(
                f"{path} is a folder that datasets' save_to_disk did not write (it has no state.json). "
                f"Give such a folder, or a {' or '.join(EXTENSIONS)} file."
            )
        rows = Rows(path, read_hf_dataset(path))
    elif path.suffix == ".jsonl":
        rows = read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = Rows(path, ParquetTable(path))
    else:
        raise DataError(
            f"{path} has the unknown extension {path.suffix!r}; expected {' or '.join(EXTENSIONS)}, or a folder "
            "that datasets' save_to_disk wrote. Convert the file."
        )
    if not len(rows):
        raise DataError(f"{path} has no rows; expected at least one.")
    return rows


def _parse_line(line: bytes, *, where: str) -> dict[str, Json]:
    if len(line) > MAX_LINE_BYTES or count_values(line) > MAX_LINE_VALUES:
        raise DataError(f"{where}: a row must have at most {MAX_LINE_BYTES} bytes and {MAX_LINE_VALUES} values.")
    try:
        value = json.loads(line.decode("utf-8-sig").rstrip("\r\n"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}, column {error.colno}: not JSON ({error.msg}). Expected one object per line."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}). Expected one object per line.") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
