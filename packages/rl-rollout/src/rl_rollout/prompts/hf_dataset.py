"""Rows of a Hugging Face dataset that `save_to_disk` wrote, memory-mapped by `datasets`."""

from collections.abc import Sequence
from pathlib import Path

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError


def is_hf_dataset(folder: Path) -> bool:
    """True for a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def read_hf_dataset(path: Path) -> Sequence[dict[str, Json]]:
    """Map a saved dataset into memory; rows stay on disk until they are asked for.

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
    try:
        return datasets.load_from_disk(str(path)).with_format(None)  # type: ignore[no-any-return]
    except Exception as error:  # datasets raises many kinds for a damaged folder
        raise DataError(f"{path}: not a readable dataset ({type(error).__name__}: {error}). Save it again.") from error
