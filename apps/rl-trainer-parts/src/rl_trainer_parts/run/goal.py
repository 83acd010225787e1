"""What validation says about a run: its best step and checkpoint, whether the target is reached, when to stop."""

from collections.abc import Callable, Mapping
from pathlib import Path

from rl_core.errors import CheckpointError, SettingsError
from rl_distill.checkpoints import CheckpointStore, verify_checkpoint
from rl_metrics.run_files import open_run, read_history
from rl_metrics.targets import EXACT, Validated, best_of, best_to_keep, num_since_best, target_of, validations_of
from rl_trainer_parts.run.folder import require_format
from rl_trainer_parts.settings.schema import TrainerSettings

METRICS = "metrics.jsonl"


class Goal:
    """The validations of a run so far, judged by `trainer.target`.

    They are read from metrics.jsonl when a run resumes, so a changed target counts for earlier validations too.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        """Start without a validation."""
        self._settings = settings
        self._target = settings.target
        self._validations: dict[int, Validated] = {}
        self._pending: set[int] = set()

    def restore(self, folder: Path, step: int) -> None:
        """Read the validations up to a step from a run's folder; later steps are trained again."""
        file = folder / METRICS
        if not file.is_file():
            return
        found = validations_of(read_history(file), self._target)
        self._validations = {one.step: one for one in found if one.step <= step}

    def noted(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a validation.

        Raises:
            SettingsError: The validation does not report the target's metric, and no earlier one did.
        """
        self._pending.discard(step)
        value = self._target.value_in(metrics)
        if value is None:
            if not self._validations:
                self._target.require_in(metrics)
            return
        self._validations[step] = Validated(step=step, value=value, is_exact=bool(metrics.get(EXACT, 1.0)))

    def begun(self, step: int) -> None:
        """A validation of this step has started; its checkpoint is kept until the result is known."""
        self._pending.add(step)

    def went_back(self) -> None:
        """The learner died; unfinished validations are abandoned or started again."""
        self._pending.clear()

    def needs_checkpoint(self, step: int) -> bool:
        """Whether this step's checkpoint must be saved because its validation is, or may become, the best."""
        return step in self.kept

    @property
    def kept(self) -> frozenset[int]:
        """Steps whose checkpoints are kept beside the newest: the best one, and those being validated."""
        if not self._settings.keep_best:
            return frozenset()
        return frozenset(self._pending) | ({self.best.step} if self.best else frozenset())

    @property
    def best(self) -> Validated | None:
        """The best validation that has a checkpoint."""
        return best_to_keep(self._in_order, self._target)

    @property
    def stop_reason(self) -> str | None:
        """Why the run should stop; None if it should continue."""
        trained = [one for one in self._in_order if one.step > 0]
        if self._target.stop:
            for one in trained:
                if self._target.is_reached(one.value):
                    return f"trainer.target: {self._target.label} reached {one.value:.4g} at step {one.step}"
        patience, best = self._settings.stop_when_no_better, best_of(self._in_order, self._target)
        num_worse = num_since_best(self._in_order, self._target)
        if patience is None or best is None or num_worse < patience:
            return None
        return (
            f"trainer.stop_when_no_better: {self._target.label} has been no better than its {best.value:.4g} of step "
            f"{best.step} for {num_worse} validations"
        )

    def summary(self) -> dict[str, str | float | int | bool | None]:
        """Fields of summary.json."""
        found: dict[str, str | float | int | bool | None] = {}
        best = self.best
        if best is not None:
            found |= {"best_step": best.step, "best_value": best.value, "best_metric": self._target.label}
        if self._target.value is not None:
            reached = next((one for one in self._in_order if self._target.is_reached(one.value)), None)
            found |= {"target": self._target.value, "target_reached": reached is not None}
            found["target_reached_at_step"] = None if reached is None else reached.step
        return found

    @property
    def _in_order(self) -> list[Validated]:
        return [self._validations[step] for step in sorted(self._validations)]


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
    of_checkpoints = [one for one in validations_of(record.history, target) if one.step > 0 and one.is_exact]
    of_checkpoints.sort(key=lambda one: one.value if target.lower_is_better else -one.value)  # early before equal later
    steps = CheckpointStore(run / "checkpoints", keep=1).steps()
    if not steps:
        raise SettingsError(f"run {run} has no checkpoint yet.")
    for validation in of_checkpoints:
        source = f"the validation of step {validation.step} ({target.label} = {validation.value:.4g})"
        if validation.step not in steps:
            say(f"note: {source} is better, but its checkpoint was not kept")
            continue
        folder = run / "checkpoints" / f"step_{validation.step}"
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            say(f"note: {source} is better, but its checkpoint is broken: {error}")
            continue
        say(f"best checkpoint: {folder}, by {source}")
        return folder
    raise SettingsError(
        f"--best: none of the checkpoints of {run} (steps {', '.join(map(str, steps))}) has a validation that reports "
        f"{target.label}. Use one of them by its path, or leave out --best for the newest."
    )
