"""Policies as Hugging Face folders: found in runs and checkpoints, checked, merged and exported."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rl_core.errors import DataError, SettingsError
from rl_distill.checkpoints import CheckpointStore, verify_checkpoint
from rl_trainer_parts.checks.model_folder import missing_path
from rl_trainer_parts.run.folder import require_format, settings_at_start
from rl_trainer_parts.run.goal import best_checkpoint
from rl_trainer_parts.settings.schema import SettingsT

ADAPTER_CONFIG = "adapter_config.json"


def find_policy(path: Path) -> Path:
    """The Hugging Face folder, or peft adapter folder, that a path refers to.

    Args:
        path: Such a folder, a checkpoint, or a run folder (its newest checkpoint).

    Raises:
        SettingsError: The path is none of these.
        CheckpointError: The checkpoint is torn.
    """
    if not path.exists():
        raise SettingsError(missing_path(path, setting="policy", kind="model"))
    if (path / "config.json").is_file() or is_adapter(path):
        return path
    require_format(path)
    if (path / "checkpoints").is_dir():
        steps = CheckpointStore(path / "checkpoints", keep=1).steps()
        if not steps:
            raise SettingsError(f"run {path} has no checkpoint yet.")
        path = path / "checkpoints" / f"step_{steps[-1]}"
    has_policy = (path / "policy" / "config.json").is_file()
    if not has_policy and not is_adapter(path / "adapter"):
        raise SettingsError(
            f"{path} is neither a Hugging Face folder (config.json), nor a checkpoint (policy/config.json or "
            f"adapter/{ADAPTER_CONFIG}), nor a run folder (checkpoints/)."
        )
    verify_checkpoint(path)
    return path / ("policy" if has_policy else "adapter")


def with_run_policy(
    settings: SettingsT, say: Callable[[str], None], *, best: bool = False, resume: bool = False
) -> SettingsT:
    """Settings whose `policy.path`, if it is a run's folder or a checkpoint, is the policy of its newest checkpoint.

    A resumed run keeps the policy of that folder from which it started.

    Args:
        settings: The run's settings.
        say: Reports which folder it is.
        best: Use the run's best checkpoint, and refuse any other folder.
        resume: Continue the run in the folder.

    Raises:
        SettingsError: The run has no such checkpoint, its checkpoints have adapters, or the resumed run's policy is
            gone.
        CheckpointError: The checkpoint is torn.
    """
    run, option = settings.policy.path, " --best" if best else ""
    if not best and not any((run / name).is_dir() for name in ("checkpoints", "policy", "adapter")):
        return settings  # a model, or nothing, which another check reports
    before = settings_at_start(settings, resume=resume) or {}
    recorded = Path(before.get("policy", {}).get("path", run))
    if run.resolve() in recorded.resolve().parents:
        if not recorded.exists():
            raise SettingsError(f"policy.path: {recorded}, from which the run started, is gone. Start another run.")
        folder = recorded
    else:
        folder = find_policy(best_checkpoint(run, say) if best else run)
    if is_adapter(folder):
        raise SettingsError(
            f"policy.path: {folder} is a LoRA adapter instead of a whole model. Write the model first: "
            f"`export {run} FOLDER{option}`, then use --policy.path=FOLDER."
        )
    say(f"policy: {folder}")
    return settings.model_copy(update={"policy": replace(settings.policy, path=folder)})


def is_adapter(folder: Path) -> bool:
    """True if a folder has an adapter in peft's format."""
    return (folder / ADAPTER_CONFIG).is_file()


@contextmanager
def opened_policy(path: Path) -> Iterator[Path]:
    """The Hugging Face folder of a policy; an adapter is merged into a temporary one.

    Args:
        path: As in `find_policy`.

    Raises:
        SettingsError: The path has no policy.
        DataError: The adapter or its base cannot be used.
        CheckpointError: The checkpoint is torn.
    """
    source = find_policy(path)
    if not is_adapter(source):
        yield source
        return
    from rl_distill.checkpoints.merged_folder import merged_policy  # imports torch

    with merged_policy(source, base=None) as folder:
        yield folder


def export_policy(
    path: Path, target: Path, *, merges: bool = False, base: Path | None = None, adapter_alone: bool = False
) -> Path:
    """Write a policy, with any adapter merged into its base, to a new folder; return its source.

    Args:
        path: As in `find_policy`.
        target: New folder.
        merges: Refuse a policy without an adapter.
        base: Hugging Face folder of the adapter's base; None uses the one the adapter names.
        adapter_alone: Write the adapter in peft's format, without its base.

    Raises:
        SettingsError: The target is not empty, the source has no policy, or it has no adapter although an option needs
            one.
        DataError: The adapter or its base cannot be used.
        CheckpointError: The checkpoint is torn.
    """
    source = find_policy(path)
    options = {"--merge": merges, "--base": base is not None, "--adapter": adapter_alone}
    for option, is_used in options.items():
        if is_used and not is_adapter(source):
            raise SettingsError(f"{source} has no adapter, because all weights were trained. Leave out {option}.")
    if adapter_alone or not is_adapter(source):
        _write_new(target, lambda part: shutil.copytree(source, part))
    else:
        from rl_distill.checkpoints.merged_folder import merge_adapter  # imports torch

        _write_new(target, lambda part: merge_adapter(source, part, base=base))
    return source


def _write_new(target: Path, write: Callable[[Path], object]) -> None:
    """Write a folder under a temporary name, and rename it when it is complete."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} exists and is not empty. Choose a new folder.")
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        write(part)
    except DataError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if target.exists():
        target.rmdir()
    part.rename(target)
