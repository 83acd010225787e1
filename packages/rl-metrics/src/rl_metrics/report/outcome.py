"""A run's outcome for the report's first view: training, changes and end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_metrics.comparison.intervals import (
    UNKNOWN,
    Interval,
    difference_of_estimates,
    mann_kendall_z,
    mean_of_draws,
    wilson,
)
from rl_metrics.health.common_rules import SCORE
from rl_metrics.report.run_parts import flat_settings
from rl_metrics.run_files.history import FloatColumn, History
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.run_record import RunRecord
from rl_metrics.validation.summary import HEADLINE

STATES = {
    "run_started": "open",
    "run_resumed": "open",
    "run_finished": "finished",
    "run_stopped": "stopped",
    "run_failed": "failed",
    "run_imported": "imported",
}
"""State of a run by the newest of these events; "open" while it runs, and after a kill."""

TESTED = ("accuracy", "mean_reward", "score")
"""What the test set may have measured; see `headline_name`."""

IMITATION = "nll"
"""Distillation loss that imitates stored texts, without a teacher."""

MAX_WINDOW = 10
"""Maximum number of steps averaged for the first or last value of training; also at most a quarter of all steps."""

MAX_VALIDATIONS = 6
"""Maximum number of sources with a shown validation."""

TREND_STEPS = 30
CLEAR_TREND = 2.0
"""Minimum significance of a trend at the end, in standard deviations."""

MAX_REASON = 300

BY_PROBLEMS = "Wilson's interval over the problems of those steps; all responses to one problem count as one"
BY_STEPS = "Student's t over the means of those steps"
BY_RECORD = "as recorded, from a bootstrap over validation problems (1,000 draws)"
BY_NOTHING = "none, because none was recorded with the validation"
BY_FEW = "none, because each end needs three steps, which it has in a run of twelve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value and its confidence interval.

    Attributes:
        value: Mean over steps, or value of one validation.
        steps: First and last of these steps.
        interval: 95 % confidence interval.
        how: Method of the interval, in words.
    """

    value: float
    steps: tuple[int, int]
    interval: Interval
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Change of one metric from the start of a run to its end.

    Attributes:
        label: Description of the metric.
        metric: Name of the metric.
        is_validation: Whether it is measured on problems that were not trained on.
        is_up_better: Whether a rise is an improvement.
        first: First value; None if the metric was recorded once.
        last: Newest value.
        change: Interval of last minus first.
        still: 1 if it is rising at the end, -1 if it is falling, else 0.
    """

    label: str
    metric: str
    is_validation: bool
    is_up_better: bool
    first: Estimate | None
    last: Estimate
    change: Interval
    still: int

    @property
    def direction(self) -> int:
        """1 if it rose, -1 if it fell, 0 if that is not clear."""
        if not self.change.is_known or self.change.contains(0.0):
            return 0
        return 1 if self.change.low > 0 else -1

    def in_words(self) -> str:
        """Return the change in words, such as "the training reward rose from 0.5 to 0.8", if it is more than chance."""
        now = f"{self.last.value:.3g}"
        if self.first is None:
            return f"{self.label} is {now} at step {self.last.steps[1]}"
        before = f"{self.first.value:.3g}"
        if before == now:
            return f"{self.label} stayed at {now}"
        if not self.change.is_known:
            return f"{self.label} went from {before} to {now} (without an interval, it may be chance)"
        if self.change.contains(0.0):
            return f"{self.label} did not clearly change ({before} to {now})"
        return f"{self.label} {'rose' if self.last.value > self.first.value else 'fell'} from {before} to {now}"


def describe_outcome(run: RunRecord) -> dict[str, Any]:
    """Return the outcome as JSON values; unknown ones are omitted, None or NaN."""
    settings = dict(flat_settings(run.settings))
    with np.errstate(all="ignore"):  # values may be near the largest float
        figures = _figures(run.history, is_imitation=settings.get("distillation.loss") == IMITATION)
        state, sentence = _verdict(run, figures, planned=settings.get("trainer.steps", ""))
        return {
            "sentence": sentence,
            "state": state,
            "trained": _trained(run, settings),
            "figures": msgspec.to_builtins(figures),
            **_speed(run),
        }


def _figures(history: History, *, is_imitation: bool) -> list[Figure]:
    """Return the training's figures first, then those of validations and the test."""
    distilled = "the cross entropy of the texts" if is_imitation else "the divergence from the teacher"
    score = next((name for name in SCORE if name in history.values), SCORE[0])
    validated = [name for name in history.values if HEADLINE.fullmatch(name)]
    found = [
        _figure(history, "actor/distillation/loss", distilled, is_up_better=False),
        _figure(history, score, "the training reward"),
        _figure(history, "sft/loss", "the cross entropy", is_up_better=False),
        _figure(history, "sft/validation_loss", "the validation loss", is_validation=True, is_up_better=False),
        *(_figure(history, name, _validation_label(name), is_validation=True) for name in validated[:MAX_VALIDATIONS]),
        *(
            _figure(history, f"test/{name}", f"the test set's {name.replace('_', ' ')}", is_validation=True)
            for name in TESTED
        ),
    ]
    if not any(found):
        losses = [name for name in history.values if name.rpartition("/")[2] == "loss"]
        found = [_figure(history, name, "the loss", is_up_better=False) for name in losses[:1]]
    return [figure for figure in found if figure is not None]


def _validation_label(name: str) -> str:
    _, *source, variable, estimate = name.split("/")
    each = estimate.removeprefix("mean@")
    return f"validation on {'/'.join(source)} ({variable}{'' if each == '1' else f', mean of {each} responses'})"


def _figure(
    history: History, name: str, label: str, *, is_validation: bool = False, is_up_better: bool = True
) -> Figure | None:
    """Return a metric's change, or None without a finite value."""
    values = _column(history, name)
    rows = np.flatnonzero(np.isfinite(values))
    if not len(rows):
        return None
    width = 1 if is_validation else max(1, min(MAX_WINDOW, len(rows) // 4))
    without = BY_NOTHING if is_validation else BY_FEW
    first = _estimate(history, name, rows[:width], without=without) if len(rows) > 1 else None
    last = _estimate(history, name, rows[-width:], without=without)
    z = mann_kendall_z(values[rows[-min(TREND_STEPS, max(1, len(rows) // 2)) :]])
    return Figure(
        label=label,
        metric=name,
        is_validation=is_validation,
        is_up_better=is_up_better,
        first=first,
        last=last,
        change=difference_of_estimates(first.value, first.interval, last.value, last.interval) if first else UNKNOWN,
        still=int(np.sign(z)) if abs(z) > CLEAR_TREND else 0,
    )


def _estimate(history: History, name: str, rows: NDArray[np.intp], *, without: str) -> Estimate:
    """Return the mean over rows of the history; `without` says why there is no interval, if there is none."""
    names = (name, "rollout/num_groups", f"{name}/ci_low", f"{name}/ci_high", "critic/score/min", "critic/score/max")
    values, groups, low, high, least, most = (_column(history, column)[rows] for column in names)
    interval, how = Interval(float(low[-1]), float(high[-1])), BY_RECORD
    if not interval.is_known and name in SCORE and groups.sum() >= 1 and least.min() >= 0 and most.max() <= 1:
        interval, how = wilson(float(values.mean()), float(groups.sum())), BY_PROBLEMS
    elif not interval.is_known:
        interval = mean_of_draws(values)
        how = BY_STEPS if interval.is_known else without
    steps = history.steps[rows]
    return Estimate(value=float(values.mean()), steps=(int(steps[0]), int(steps[-1])), interval=interval, how=how)


def _column(history: History, name: str) -> FloatColumn:
    """Return the [S] column of a metric; all NaN if the run lacks it."""
    column = history.get(name)
    return np.full(len(history.steps), np.nan) if column is None else column


def _verdict(run: RunRecord, figures: Sequence[Figure], *, planned: str) -> tuple[str, str]:
    """Return the run's state, and a sentence on its end and its changes."""
    ending: Mapping[str, Any] = next((event for event in reversed(run.events) if event["event"] in [*STATES]), {})
    state = STATES.get(ending.get("event", ""), "finished" if run.is_finished else "unknown")
    reason = str(ending.get("error") or ending.get("paused_by") or "").partition("\n")[0][:MAX_REASON].rstrip(".")
    because = f": {reason}" if reason else ""
    done = int(run.history.steps[-1]) if len(run.history.steps) else 0
    if not done and not figures:
        before = {"failed": "The run failed", "stopped": "It was stopped"}.get(state)
        return state, f"{before} before its first step{because}." if before else "No step has finished yet."
    of_all = f" of {planned}" if planned.isdecimal() and int(planned) > done else ""
    ended = {
        "failed": f"The run failed after step {done}{of_all}{because}; ",
        "stopped": f"It was stopped after step {done}{of_all}{because}; ",
        "open": f"Not finished, at step {done}{of_all}; ",
    }.get(state, "")
    steps = "" if ended else f" in {done}{of_all} {'step' if f'{done}{of_all}' == '1' else 'steps'}"
    sentence = ended + _what_changed(figures, steps=steps)
    return state, f"{sentence[:1].upper()}{sentence[1:]}."


def _what_changed(figures: Sequence[Figure], *, steps: str) -> str:
    """Describe the changes of the first validation, of those that moved otherwise, and of the training."""
    moved = [one for one in figures if one.first is not None]
    if not figures:
        return f"no reward, loss or validation was recorded{steps}"
    if not moved:
        return f"{figures[0].in_words()}, and one value does not show whether it learns"
    validated = [one for one in (*moved, *figures) if one.is_validation]
    others = [one for one in moved if one.is_validation and one.direction != validated[0].direction]
    telling = [*validated[:1], *others, *[one for one in moved if not one.is_validation][:1]]
    *before, last = [one.in_words() for one in telling]
    return f"{', '.join(before)} and {last}{steps}" if before else last + steps


def _trained(run: RunRecord, settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return names and values that describe the training, as far as the settings or the import record them."""
    prompts, group = settings.get("rollout.prompts_per_step"), settings.get("rollout.group_size")
    staleness = settings.get("schedule.max_staleness")
    known = (
        ("model", settings.get("policy.path")),
        ("method", "supervised" if "sft.columns" in settings else _method(run.settings, settings)),
        ("data", settings.get("prompts.train")),
        ("reward", settings.get("reward.function")),
        ("a step", f"{prompts} prompts, {group} responses each" if prompts and group else ""),
        ("rollouts", _replayed(run.history, settings)),
        ("training", f"asynchronous, staleness at most {staleness}" if staleness else "synchronous" if prompts else ""),
        ("imported from", next((str(one.get("trainer")) for one in run.events if one["event"] == "run_imported"), "")),
    )
    return [(name, value) for name, value in known if value]


def _replayed(history: History, settings: Mapping[str, str]) -> str:
    """Return how many steps trained on rollouts from a skip cache; empty if none did."""
    num_steps = int((_column(history, "rollout/replayed") > 0).sum())
    source = settings.get("rollout_cache.directory", "a skip cache")
    return f"{num_steps} of {len(history.steps)} steps replayed from {source}" if num_steps else ""


def _method(settings: Mapping[str, Any], flat: Mapping[str, str]) -> str:
    """Return the method, such as "GRPO, loss ppo_clip"."""
    distillation = settings.get("distillation")
    teachers = distillation.get("teachers") if isinstance(distillation, Mapping) else None
    rewarded = flat.get("algorithm.advantage", "").upper().replace("_", " ")
    if rewarded and (loss := flat.get("algorithm.policy_loss")):
        rewarded += f", loss {loss}"
    texts = flat.get("distillation.texts")
    if flat.get("distillation.loss") == IMITATION and texts:
        return f"supervised, imitates the texts of the column {texts}"
    if not isinstance(teachers, Mapping) or not teachers:
        return rewarded
    distilled = f"distillation from {', '.join(teachers)}, loss {flat.get('distillation.loss', 'unknown')}"
    return f"{distilled}, with {rewarded}" if flat.get("distillation.use_task_rewards") == "true" else distilled


def _speed(run: RunRecord) -> dict[str, float]:
    """Return times and numbers of trajectories, from the summary if it has them, else from the steps."""
    history = run.history
    step_s, num_samples = (
        float(np.nansum(_column(history, name))) or math.nan for name in ("timing_s/step", "rollout/num_trajectories")
    )
    span_s = float(history.times[-1] - history.times[0]) or math.nan if len(history.times) else math.nan
    computed = {
        "wall_s": span_s if span_s > step_s or math.isnan(step_s) else step_s,
        "num_samples": num_samples,
        "samples_per_s": num_samples / step_s,
    }
    known = {name: number_or_nan(run.summary.get(name)) for name in computed}
    step_s /= max(1, int((history.steps > 0).sum()))
    return {"step_s": step_s} | {name: computed[name] if math.isnan(one) else one for name, one in known.items()}
