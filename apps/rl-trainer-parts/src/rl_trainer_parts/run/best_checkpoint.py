"""The best checkpoint of a run, by its validations and `trainer.target`; for `--best`."""

from collections.abc import Callable
from pathlib import Path

from rl_core.errors import CheckpointError, SettingsError
from rl_distill.checkpoints import CheckpointStore, verify_checkpoint
from rl_metrics.run_files import open_run
from rl_metrics.targets import TargetOptions, Validated, target_of, validations_of
from rl_trainer_parts.run.folder import require_format


def best_checkpoint(run: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint with the best validation of a run; torn ones are reported and skipped.

    Args:
        run: The run's folder.
        say: Reports which checkpoint it is, and why a better one is not used.

    Raises:
        SettingsError: The path is not a run's folder, or no checkpoint has a validation.
        CheckpointError: The folder cannot be read.
    """
    if not (run / "checkpoints").is_dir():
        raise SettingsError(f"--best needs the folder of a run with checkpoints/; {run} is none.")
    require_format(run)
    record = open_run(run)
    target = target_of(record.settings)
    ranked = _ranked(validations_of(record.history, target), target)
    steps = CheckpointStore(run / "checkpoints", keep=1).steps()
    if not steps:
        raise SettingsError(f"run {run} has no checkpoint yet.")
    for one in ranked:
        told = f"the validation of step {one.step} ({target.label} = {one.value:.4g})"
        if one.step not in steps:
            say(f"note: {told} is better, but its checkpoint was not kept")
            continue
        folder = run / "checkpoints" / f"step_{one.step}"
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            say(f"note: {told} is better, but its checkpoint is broken: {error}")
            continue
        say(f"best checkpoint: {folder}, by {told}")
        return folder
    raise SettingsError(
        f"--best: none of the checkpoints of {run} (steps {', '.join(map(str, steps))}) has a validation that reports "
        f"{target.label}. Use one of them by its path, or leave out --best for the newest."
    )


def _ranked(validations: tuple[Validated, ...], target: TargetOptions) -> list[Validated]:
    """Validations of trained policies by their own weights, best first and early ones before equal later ones."""
    of_checkpoints = [one for one in validations if one.step > 0 and one.is_exact]
    return sorted(of_checkpoints, key=lambda one: one.value if target.lower_is_better else -one.value)
