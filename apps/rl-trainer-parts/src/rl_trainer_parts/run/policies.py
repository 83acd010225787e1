"""Policies as Hugging Face folders: found in runs and checkpoints, checked, exported."""

import shutil
from pathlib import Path

from rl_core.errors import SettingsError
from rl_distill.checkpoints import CheckpointStore, verify_checkpoint
from rl_trainer_parts.checks.model_folder import missing_path


def find_policy(path: Path) -> Path:
    """The Hugging Face folder that a path stands for.

    Args:
        path: A Hugging Face folder, a checkpoint, or a run folder (its newest checkpoint).

    Raises:
        SettingsError: It is none of these.
        CheckpointError: The checkpoint is torn.
    """
    if not path.exists():
        raise SettingsError(missing_path(path, setting="policy", kind="model"))
    if (path / "config.json").is_file():
        return path
    if (path / "checkpoints").is_dir():
        steps = CheckpointStore(path / "checkpoints", keep=1).steps()
        if not steps:
            raise SettingsError(f"run {path} has no checkpoint yet.")
        path = path / "checkpoints" / f"step_{steps[-1]}"
    if not (path / "policy" / "config.json").is_file():
        raise SettingsError(
            f"{path} is neither a Hugging Face folder (config.json), nor a checkpoint (policy/config.json), nor a run "
            "folder (checkpoints/)."
        )
    verify_checkpoint(path)
    return path / "policy"


def export_policy(path: Path, target: Path) -> Path:
    """Copy a policy into a new folder, and say which one it was.

    Raises:
        SettingsError: The target exists and is not empty, or the source has no policy.
    """
    source = find_policy(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} exists and is not empty; name a new folder.")
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    if target.exists():
        target.rmdir()
    part.rename(target)
    return source
