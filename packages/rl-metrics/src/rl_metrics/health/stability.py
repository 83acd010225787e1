"""The table of a run's stability: mean over all steps and newest value, beside the healthy ranges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from rl_metrics.definitions import entries
from rl_metrics.definitions.definition import Band
from rl_metrics.health.common_rules import LOSS, REFERENCE_KL
from rl_metrics.health.finding import Check, Verdict
from rl_metrics.health.rules import GRADIENT_ALONE, Family
from rl_metrics.run_files.history import History
from rl_metrics.run_files.json_lines import as_plain

Mark = Literal["ok", "outside", "accepted", "unknown"]
"""Whether both values are in their ranges; "accepted" is outside, but the check of a rule gives a reason.

"unknown" if there is no range for what the run learns from, or if the metric's rules were not judged.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityRow:
    """One metric of the table.

    Attributes:
        label: Description of the metric.
        metric: Name of the metric.
        mean: Mean over all steps.
        last: Newest value.
        step: Step of the newest value.
        healthy_mean: Healthy range of the mean; empty without one.
        healthy_last: Healthy range of the newest value; empty without one.
        source: Sources of the ranges.
        mark: Whether the values are in their ranges.
        why: Why the mark is "unknown" or "accepted", or why no check warns about a value outside; else empty.
        rules: Rules that judge the metric.
    """

    label: str
    metric: str
    mean: float
    last: float
    step: int
    healthy_mean: str
    healthy_last: str
    source: str
    mark: Mark
    why: str
    rules: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values; values that are not finite are null."""
        row: dict[str, Any] = as_plain(msgspec.to_builtins(self))
        return row


_Entry = tuple[str, tuple[str, ...], Band | None, Band | None, tuple[str, ...]]

ENTRIES: tuple[_Entry, ...] = (
    ("policy loss", LOSS, entries.POLICY_LOSS_MEAN, entries.POLICY_LOSS_MEAN, ("policy_loss",)),
    ("entropy", ("actor/entropy",), None, entries.ENTROPY, ("entropy_collapse", "entropy_rise", "entropy_final")),
    ("KL of a step", ("actor/ppo_kl",), entries.STEP_KL, entries.STEP_KL, ("kl_high",)),
    (
        "KL to the reference",
        REFERENCE_KL[::-1],
        entries.KL_TO_REFERENCE,
        entries.KL_TO_REFERENCE,
        ("kl_loss_high", "reference_kl_high"),
    ),
    ("gradient norm", ("actor/grad_norm",), entries.GRAD_NORM_MEAN, entries.GRAD_NORM, ("grad_norm",)),
    ("mean advantage", ("critic/advantages/mean",), entries.ADVANTAGES_MEAN, entries.ADVANTAGES_MEAN, ("policy_loss",)),
)
"""Label, alternative metrics, healthy ranges of the mean and of the newest value, and the rules that judge them."""


def stability(history: History, verdict: Verdict, *, family: Family = "policy_gradient") -> tuple[StabilityRow, ...]:
    """Return the table of a run's stability, without metrics that the run does not record.

    Args:
        history: Metrics of the run.
        verdict: Verdict on the run.
        family: What the run learns from; the ranges are for a policy gradient.
    """
    has_ranges = family in GRADIENT_ALONE
    rows = []
    for label, names, *healthy, rules in ENTRIES:
        metric = next((name for name in names if name in history.values), None)
        known = np.flatnonzero(np.isfinite(history.values[metric] if metric else np.zeros(0)))
        if metric is None or not len(known):
            continue
        values = history.values[metric][known]
        with np.errstate(all="ignore"):  # values may be near the largest float
            mean, last = float(values.mean()), float(values[-1])
        bands = healthy if has_ranges else (None, None)
        is_ok = all(band is None or band.contains(value) for band, value in zip(bands, (mean, last), strict=True))
        checks = [check for check in verdict.checks if check.rule in rules]
        mark, why = _marked(checks, has_ranges=has_ranges, is_ok=is_ok)
        rows.append(
            StabilityRow(
                label=label,
                metric=metric,
                mean=mean,
                last=last,
                step=int(history.steps[known[-1]]),
                healthy_mean=str(bands[0] or ""),
                healthy_last=str(bands[1] or ""),
                source="; ".join(dict.fromkeys(band.source for band in bands if band)),
                mark=mark,
                why=why,
                rules=rules,
            )
        )
    return tuple(rows)


def _marked(checks: Sequence[Check], *, has_ranges: bool, is_ok: bool) -> tuple[Mark, str]:
    """Return the mark of a metric with these checks, and why."""
    if not has_ranges:
        return "unknown", "the ranges are for a policy gradient"
    if not checks:
        return "unknown", "its rules are switched off"
    if all(check.status == "unknown" for check in checks):
        return "unknown", checks[0].reading
    if is_ok:
        return "ok", ""
    if any(check.status in ("warning", "critical") for check in checks):
        return "outside", ""
    excuses = [check.excuse for check in checks if check.excuse]
    return ("accepted", excuses[0]) if excuses else ("outside", "no check warns about it yet")
