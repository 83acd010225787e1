"""What a run came to, as the report's first view says it: what was trained, what changed, and how it ended."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_metrics.comparison.intervals import (
    UNKNOWN,
    Interval,
    difference_of_estimates,
    mean_of_draws,
    wilson,
)
from rl_metrics.comparison.trends import mann_kendall_z
from rl_metrics.health.common_rules import SCORE
from rl_metrics.report.run_parts import flat_settings
from rl_metrics.run_files.events import BEGUN, ENDED
from rl_metrics.run_files.history import FloatColumn, History
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.run_record import RunRecord
from rl_metrics.validation.summary import HEADLINE

Rows = NDArray[np.intp]
"""Of a history."""

State = Literal["finished", "stopped", "failed", "open", "imported", "unknown"]
"""How a run ended: "open" while it goes on, and after a kill; "unknown" where no events tell."""

MAX_WINDOW = 10
"""Steps at either end whose mean stands for the training's first, or last, value: a quarter of the steps at most."""

MAX_VALIDATIONS = 6
"""Sources whose validation is shown."""

TREND_STEPS = 30
CLEAR_TREND = 2.0
MAX_REASON = 300
"""Standard deviations."""

BY_PROBLEMS = "Wilson's over the problems of those steps; all responses to one problem count as one"
BY_STEPS = "Student's t over the means of those steps"
BY_RECORD = "as recorded, from drawing validation problems anew 1,000 times (bootstrap)"
BY_NOTHING = "none, as neither an interval nor the number of problems was recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value and how sure it is.

    Attributes:
        value: A mean over steps, or of one validation.
        interval: 95 %.
        steps: The first and the last that it is of.
    """

    value: float
    interval: Interval
    steps: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """How one metric went from the beginning of a run to its end.

    Attributes:
        label: What it measures.
        metric: Its name.
        is_validation: Measured on problems that were not trained on.
        is_up_better: Whether a rise is progress.
        first: None where the metric was written once.
        last: The newest.
        change: Interval of last minus first.
        how: Where the intervals come from.
        still: 1 while it rises at the end, -1 while it falls, else 0.
    """

    label: str
    metric: str
    is_validation: bool = False
    is_up_better: bool = True
    first: Estimate | None
    last: Estimate
    change: Interval
    how: str
    still: int = 0

    def in_words(self) -> str:
        """Such as "the reward rose from 0.5 to 0.8"."""
        now = f"{self.last.value:.3g}"
        if self.first is None:
            return f"{self.label} is {now} at step {self.last.steps[1]}"
        before = f"{self.first.value:.3g}"
        if before == now:
            return f"{self.label} stayed at {now}"
        if self.change.is_known and self.change.contains(0.0):
            return f"{self.label} did not clearly change ({before} to {now})"
        return f"{self.label} {'rose' if self.last.value > self.first.value else 'fell'} from {before} to {now}"


def describe_outcome(run: RunRecord) -> dict[str, Any]:
    """The outcome as JSON values; what is not known is left out, None or NaN."""
    settings = dict(flat_settings(run.settings))
    state, reason = _ending(run)
    done = int(run.history.steps[-1]) if len(run.history.steps) else 0
    planned = settings.get("trainer.steps", "")
    with np.errstate(all="ignore"):  # values may be as large as a float can be
        figures = list(_figures(run.history))
        return {
            "sentence": _sentence(figures, state=state, reason=reason, done=done, planned=planned),
            "state": state,
            "trained": _trained(run, settings),
            "figures": msgspec.to_builtins(figures),
            **_speed(run),
        }


def _figures(history: History) -> Iterator[Figure]:
    """The training's first, then validations, then the test."""
    score = next((name for name in SCORE if name in history.values), SCORE[0])
    trained = [
        _of_training(history, "actor/distillation/loss", "the divergence from the teacher", is_up_better=False),
        _of_training(history, score, "the training reward"),
        _of_training(history, "sft/loss", "the cross entropy", is_up_better=False),
    ]
    validated = [name for name in history.values if HEADLINE.fullmatch(name)]
    found = [
        *trained,
        *(_of_validation(history, name, _validation_label(name)) for name in validated[:MAX_VALIDATIONS]),
    ]
    found.append(_of_validation(history, "test/accuracy", "the accuracy on the test set"))
    known = [figure for figure in found if figure is not None]
    if not known:
        losses = (name for name in history.values if name.rpartition("/")[2] == "loss")
        known = [loss for name in losses if (loss := _of_training(history, name, "the loss", is_up_better=False))][:1]
    yield from known


def _validation_label(name: str) -> str:
    _, *source, variable, estimate = name.split("/")
    each = estimate.removeprefix("mean@")
    return f"validation on {'/'.join(source)} ({variable}{'' if each == '1' else f', mean of {each} responses'})"


def _of_training(history: History, name: str, label: str, *, is_up_better: bool = True) -> Figure | None:
    values = history.get(name)
    rows = np.flatnonzero(np.isfinite(values)) if values is not None else np.zeros(0, int)
    if values is None or not len(rows):
        return None
    width = max(1, min(MAX_WINDOW, len(rows) // 4))
    ends = [rows[:width], rows[-width:]] if len(rows) > 1 else [rows]
    intervals = [_over_steps(history, name, of_end) for of_end in ends]
    estimates = [
        Estimate(value=float(values[of_end].mean()), interval=interval, steps=_span(history, of_end))
        for of_end, (interval, _) in zip(ends, intervals, strict=True)
    ]
    z = mann_kendall_z(values[rows[-min(TREND_STEPS, max(1, len(rows) // 2)) :]])
    still = int(np.sign(z)) if abs(z) > CLEAR_TREND else 0
    return _figure(label, name, estimates, how=intervals[-1][1], is_up_better=is_up_better, still=still)


def _over_steps(history: History, name: str, rows: Rows) -> tuple[Interval, str]:
    """The interval of a mean over steps, and where it comes from."""
    values = history.values[name][rows]
    groups = _column(history, "rollout/num_groups")[rows].sum()
    lowest, highest = (_column(history, f"critic/score/{end}")[rows] for end in ("min", "max"))
    if name in SCORE and groups >= 1 and lowest.min() >= 0 and highest.max() <= 1:  # NaN is neither
        return wilson(float(values.mean()), float(groups)), BY_PROBLEMS
    interval = mean_of_draws(values)
    return interval, BY_STEPS if interval.is_known else BY_NOTHING


def _of_validation(history: History, name: str, label: str) -> Figure | None:
    values = _column(history, name)
    rows = np.flatnonzero(np.isfinite(values))
    if not len(rows):
        return None
    columns = [values, *(_column(history, f"{name}/{end}") for end in ("ci_low", "ci_high"))]
    estimates = []
    for row in [rows[:1], rows[-1:]] if len(rows) > 1 else [rows]:
        value, low, high = (column[row].item() for column in columns)
        estimates.append(Estimate(value=value, interval=Interval(low, high), steps=_span(history, row)))
    how = BY_RECORD if estimates[-1].interval.is_known else BY_NOTHING
    return _figure(label, name, estimates, how=how, is_validation=True)


def _figure(label: str, metric: str, estimates: Sequence[Estimate], *, how: str, **more: Any) -> Figure:
    *before, last = estimates
    first = before[0] if before else None
    change = UNKNOWN
    if first is not None and first.interval.is_known and last.interval.is_known:
        change = difference_of_estimates(first.value, first.interval, last.value, last.interval)
    return Figure(label=label, metric=metric, first=first, last=last, change=change, how=how, **more)


def _column(history: History, name: str) -> FloatColumn:
    """[S] NaN where the run has no such metric."""
    column = history.get(name)
    return np.full(len(history.steps), np.nan) if column is None else column


def _span(history: History, rows: Rows) -> tuple[int, int]:
    return int(history.steps[rows[0]]), int(history.steps[rows[-1]])


def _ending(run: RunRecord) -> tuple[State, str]:
    """How the newest launch ended, and why it failed or paused; "" where that says nothing."""
    for event in reversed(run.events):
        if event["event"] in ENDED:
            reason = str(event.get("error") or event.get("paused_by") or "").partition("\n")[0]
            states: Mapping[str, State] = {"run_finished": "finished", "run_stopped": "stopped", "run_failed": "failed"}
            return states[event["event"]], reason[:MAX_REASON]
        if event["event"] in BEGUN:
            return "open", ""
    if any(event["event"] == "run_imported" for event in run.events):
        return "imported", ""
    return ("finished" if run.is_finished else "unknown"), ""


def _sentence(figures: Sequence[Figure], *, state: State, reason: str, done: int, planned: str) -> str:
    """The verdict: how it ended, and what changed."""
    moved = [one for one in figures if one.first is not None]
    validated = [*(one for one in moved if one.is_validation), *(one for one in figures if one.is_validation)]
    telling = [*validated[:1], *[one for one in moved if not one.is_validation][:1]] if moved else []
    what = " and ".join(one.in_words() for one in telling) or "no reward, loss or validation was recorded"
    if not telling and figures:
        what = f"{figures[0].in_words()}, and one value does not tell whether it learns"
    because = f": {reason.rstrip('.')}" if reason else ""
    if not done and not telling:
        before = {"failed": "The run failed", "stopped": "It was stopped"}
        return f"{before[state]} before its first step{because}." if state in before else "No step is done yet."
    of_all = f" of {planned}" if planned.isdecimal() and int(planned) > done else ""
    where = f"step {done}{of_all}"
    ended = {
        "failed": f"The run failed after {where}{because}",
        "stopped": f"It was stopped after {where}{because}",
        "open": f"Not finished, at {where}",
    }
    if state in ended:
        return f"{ended[state]}; {what}."
    capital = f"{what[:1].upper()}{what[1:]}"
    if not telling:
        return f"{capital}." if figures else f"{where.capitalize()}: {what}."
    return f"{capital} in {done}{of_all} {'step' if where == 'step 1' else 'steps'}."


def _trained(run: RunRecord, settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names and values of what was trained, as far as the settings or the import say."""
    imported = next((event for event in run.events if event["event"] == "run_imported"), {})
    prompts, group = settings.get("rollout.prompts_per_step"), settings.get("rollout.group_size")
    kind = "" if "rollout.prompts_per_step" not in settings else "synchronous"
    if "schedule.max_staleness" in settings:
        kind = f"asynchronous, staleness at most {settings['schedule.max_staleness']}"
    known = (
        ("model", settings.get("policy.path")),
        ("method", _method(run.settings, settings)),
        ("data", settings.get("prompts.train")),
        ("reward", settings.get("reward.function")),
        ("a step", f"{prompts} prompts, {group} responses each" if prompts and group else ""),
        ("training", kind),
        ("imported from", str(imported.get("trainer", ""))),
    )
    return [(name, value) for name, value in known if value]


def _method(settings: Mapping[str, Any], flat: Mapping[str, str]) -> str:
    """Such as "GRPO, loss ppo_clip"."""
    distillation = settings.get("distillation")
    teachers = distillation.get("teachers") if isinstance(distillation, Mapping) else None
    rewarded = flat.get("algorithm.advantage", "").upper().replace("_", " ")
    if rewarded and (loss := flat.get("algorithm.policy_loss")):
        rewarded += f", loss {loss}"
    if not isinstance(teachers, Mapping) or not teachers:
        return rewarded
    distilled = f"distillation from {', '.join(teachers)}, loss {flat.get('distillation.loss', 'unknown')}"
    return f"{distilled}, with {rewarded}" if flat.get("distillation.use_task_rewards") == "true" else distilled


def _speed(run: RunRecord) -> dict[str, float]:
    """Seconds and trajectories: of the summary where there is one, else of the steps."""
    history, summary = run.history, run.summary
    step_s = float(np.nansum(_column(history, "timing_s/step")))
    span_s = float(history.times[-1] - history.times[0]) if len(history.times) else math.nan
    num_samples = float(np.nansum(_column(history, "rollout/num_trajectories")))
    known = {name: number_or_nan(summary.get(name)) for name in ("wall_s", "num_samples", "samples_per_s")}
    computed = {
        "wall_s": max(step_s, span_s) if span_s > 0 else step_s or math.nan,
        "num_samples": num_samples or math.nan,
        "samples_per_s": num_samples / step_s if num_samples and step_s > 0 else math.nan,
    }
    steps = {"step_s": step_s / max(1, int((history.steps > 0).sum())) or math.nan}
    return steps | {name: computed[name] if math.isnan(value) else value for name, value in known.items()}
