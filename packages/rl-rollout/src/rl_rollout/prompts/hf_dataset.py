"""Rows of a Hugging Face dataset that `save_to_disk` wrote, memory-mapped by `datasets`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError
from rl_core.files import read_json_object, try_arrow_files

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
        found = datasets.load_from_disk(str(path)).with_format(None)
    except Exception as error:  # datasets raises many types for a damaged folder
        raise DataError(f"{path}: not a readable dataset ({type(error).__name__}: {error}). Save it again.") from error
    _refuse_media(found.features, path)
    return found  # type: ignore[no-any-return]


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


def _refuse_media(features: Any, path: Path) -> None:
    """Refuse columns for which `datasets` opens files or URLs when a row is read."""
    waiting = [features]
    while waiting:
        feature = waiting.pop()
        if hasattr(feature, "decode_example") and hasattr(feature, "decode"):
            raise DataError(f"{path} must have columns of text, numbers and lists; found {type(feature).__name__}.")
        if isinstance(feature, dict):
            waiting += feature.values()
        elif isinstance(feature, list | tuple):
            waiting += feature
        elif hasattr(feature, "feature"):
            waiting.append(feature.feature)
