"""Whether validation has reached the run's target."""

from rl_metrics.health.finding import TargetVerdict
from rl_metrics.run_files.history import History
from rl_metrics.targets import TargetOptions, best_of, validations_of


def judge_target(history: History, target: TargetOptions) -> TargetVerdict | None:
    """Return the verdict on the run's target; None without a value to reach."""
    if target.value is None:
        return None
    validations = validations_of(history, target)
    best = best_of(validations, target)
    reached = next((one for one in validations if target.is_reached(one.value)), None)
    aim = f"{target.label} {'<=' if target.lower_is_better else '>='} {target.value:.4g}"
    if best is None:
        text = f"target {aim}: not judged, because no validation reports it yet"
    elif reached is None:
        newest = validations[-1]
        text = (
            f"target {aim}: not reached; best {best.value:.4g} at step {best.step}, newest {newest.value:.4g} at step "
            f"{newest.step}"
        )
    else:
        text = (
            f"target {aim}: reached at step {reached.step} ({reached.value:.4g}); best {best.value:.4g} at step "
            f"{best.step}"
        )
    return TargetVerdict(
        metric=target.label,
        value=target.value,
        lower_is_better=target.lower_is_better,
        is_reached=reached is not None,
        reached_at_step=None if reached is None else reached.step,
        best=None if best is None else best.value,
        best_step=None if best is None else best.step,
        text=text,
    )
