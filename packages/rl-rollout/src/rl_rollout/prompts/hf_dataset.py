"""Rows of a Hugging Face dataset that `save_to_disk` wrote, memory-mapped by `datasets`."""

from collections.abc import Iterator
from pathlib import Path

from rl_core.data.records import Json
from rl_core.errors import DataError, MissingExtraError


def is_hf_dataset(folder: Path) -> bool:
    """True for a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


class HfDatasetRows:
    """A saved dataset; rows stay on disk until they are asked for."""

    def __init__(self, path: Path) -> None:
        """Map the dataset into memory.

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
                f"{path}: folders of Hugging Face datasets need `datasets`. Run: pip install 'rl-rollout[datasets]'"
            ) from error
        self.path = path
        try:
            self._dataset = datasets.load_from_disk(str(path)).with_format(None)
        except Exception as error:  # datasets raises many kinds for a damaged folder
            raise DataError(
                f"{path}: not a readable dataset ({type(error).__name__}: {error}). Save it again."
            ) from error

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> dict[str, Json]:
        """A row by its index from 0."""
        found: dict[str, Json] = self._dataset[row]
        return found

    def __iter__(self) -> Iterator[dict[str, Json]]:
        return iter(self._dataset)

    def locate(self, row: int) -> str:
        """Folder and row, counted from 1."""
        return f"{self.path}, row {row + 1}"
