"""Plots of several runs' metrics: one panel per metric, one line per run."""

import difflib
import fnmatch
import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import structlog

from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_core.files import write_durably
from rl_metrics.comparison.compare import ENDS
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.output_file import check_output
from rl_metrics.trackers.jsonl import MetricRow, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = structlog.get_logger(__name__)

Across = Literal["step", "wall_s"]
"""Quantity on the horizontal axis."""

ACROSS: Mapping[Across, str] = {"step": "step", "wall_s": "time since the first step began (s)"}
FILE = "metrics.jsonl"
FORMATS: Mapping[str, dict[str, Any]] = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
"""File metadata to leave out, by suffix, so that equal plots have equal bytes."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Palette of Okabe and Ito 2008, distinguishable by colour-blind readers."""
STYLES = ("-", "--", "-.", ":")
MAX_MARKED = 40
"""Maximum number of points of a line that are marked."""
MAX_PANELS = 50
"""Maximum number of panels from globs; more would be unreadable."""
NOT_SHOWN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that an image cannot contain as text: lone surrogates, and those not allowed in XML."""
PANEL_INCHES = (7.0, 2.7)
LOOK: Mapping[Any, Any] = {
    "svg.hashsalt": "rl-metrics",  # otherwise the ids in the file are random
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLine:
    """A horizontal line, such as a teacher's accuracy.

    Attributes:
        value: Vertical position.
        label: Label; None shows the value.
        metric: Metric of its panel; None draws it in all panels.
    """

    value: float
    label: str | None = None
    metric: str | None = None

    @classmethod
    def parse(cls, text: str) -> "ReferenceLine":
        """Read `[METRIC=]VALUE[:LABEL]`.

        Raises:
            SettingsError: The text has another form.
        """
        found = re.fullmatch(r"(?:(?P<metric>[^=:]+)=)?(?P<value>[^=:]+)(?::(?P<label>.+))?", text)
        try:
            value = float(found["value"]) if found else math.nan
        except ValueError:
            value = math.nan
        if found is None or not math.isfinite(value):
            raise SettingsError(f"a line must be [METRIC=]VALUE[:LABEL], such as 0.9:teacher; found {text!r}.")
        return cls(value=value, label=found["label"], metric=found["metric"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Contents of a plot.

    Attributes:
        metrics: Metrics, one panel each, from top to bottom; a glob, such as `actor/*`, selects all that match.
        labels: Labels of the runs; empty uses the names of their folders.
        across: "step", or "wall_s" for seconds since a run's first step began, including pauses before resumes.
        lines: Horizontal lines.
    """

    metrics: Sequence[str]
    labels: Sequence[str] = ()
    across: Across = "step"
    lines: Sequence[ReferenceLine] = ()


def plot_runs(folders: Sequence[Path], output: Path, *, plot: Plot) -> None:
    """Plot metrics of runs and write the image atomically. Equal inputs produce equal bytes.

    Args:
        folders: Folders of runs with a metrics.jsonl, or such files; runs may still be writing.
        output: A .svg or .png file in an existing folder.
        plot: Contents of the plot.

    Raises:
        SettingsError: Labels and runs differ in number, nothing is to be drawn, or the output has another suffix.
        DataError: A folder has no metrics, or no run has a metric; the message names the nearest one.
        MissingExtraError: matplotlib is not installed.
    """
    _check(folders, output, plot)
    runs = dict(zip(plot.labels or _names(folders), map(_read, map(_metrics_of, folders)), strict=True))
    plot = replace(plot, metrics=_spelled_out(plot.metrics, runs))
    for metric in plot.metrics:
        _check_metric(metric, runs)
    for line in plot.lines:
        if line.metric is not None and line.metric not in plot.metrics:
            raise SettingsError(f"a line is for {line.metric!r}, which is not drawn; drawn: {', '.join(plot.metrics)}.")
    content = io.BytesIO()
    with _drawing() as figure:
        _draw(figure, runs, plot)
        suffix = output.suffix.lower()
        figure.savefig(content, format=suffix[1:], metadata=FORMATS[suffix])
    write_durably(output, content.getvalue())


def _check(folders: Sequence[Path], output: Path, plot: Plot) -> None:
    if not folders or not plot.metrics:
        raise SettingsError(f"a plot needs runs and metrics; found {len(folders)} and {len(plot.metrics)}.")
    if plot.across not in get_args(Across):
        raise SettingsError(f"across must be step or wall_s; found {plot.across!r}.")
    if plot.labels and len(plot.labels) != len(folders):
        raise SettingsError(f"labels must be one per run, or none; found {len(plot.labels)} for {len(folders)} runs.")
    for what, given in (("labels", plot.labels), ("metrics", plot.metrics)):
        twice = [one for one, count in Counter(given).items() if count > 1]
        if twice:
            raise SettingsError(f"{what} must differ; found {twice[0]!r} more than once.")
    check_output(output, what="the image", endings=list(FORMATS))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many parents as make them unique; for a file not named FILE, its own."""
    parts = [_named(folder.resolve()).parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of_one[-depth:]) for of_one in parts]
        if len(set(names)) == len(names):
            return names
    raise SettingsError(f"each run must be given once; found {', '.join(map(str, folders))}.")


def _named(run: Path) -> Path:
    if not run.is_file():
        return run
    return run.parent if run.name == FILE else run.with_suffix("")


def _metrics_of(run: Path) -> Path:
    file = run if run.is_file() else run / FILE
    if not file.is_file():
        raise DataError(f"{run} must be a run's folder with a {FILE}, or such a file; found none there.")
    return file


def _read(file: Path) -> list[MetricRow]:
    rows = read_metrics(file)
    if not rows:
        raise DataError(f"{file} must have lines of steps; found none. Has the run finished its first step?")
    return rows


def _spelled_out(metrics: Sequence[str], runs: Mapping[str, Sequence[MetricRow]]) -> list[str]:
    """Replace each glob by the metrics that match; ends of intervals must be named exactly."""
    known = {
        name for rows in runs.values() for row in rows for name, value in row.metrics.items() if math.isfinite(value)
    }
    found: dict[str, None] = {}
    for metric in metrics:
        fitting = [name for name in fnmatch.filter(sorted(known), metric) if not name.endswith(ENDS)]
        found |= dict.fromkeys(fitting if metric not in known and fitting else [metric])
    if len(found) > max(MAX_PANELS, len(metrics)):
        raise SettingsError(
            f"an image has at most {MAX_PANELS} panels; found {len(found)} metrics that match {', '.join(metrics)}. "
            "Use a narrower glob."
        )
    return list(found)


def _check_metric(metric: str, runs: Mapping[str, Sequence[MetricRow]]) -> None:
    """Refuse a metric that no run has; warn about runs without it."""
    without = [label for label, rows in runs.items() if not _points(rows, metric, "step")[0]]
    if len(without) == len(runs):
        known = sorted({name for rows in runs.values() for row in rows for name in row.metrics})
        near = difflib.get_close_matches(metric, known, n=1, cutoff=0.4)
        hint = f"the nearest recorded metric is {near[0]!r}" if near else f"the runs have {len(known)} other metrics"
        raise DataError(f"metric {metric!r} has no value in {', '.join(runs)}; {hint}.")
    if without:
        log.warning("runs_without_metric", metric=_shown(metric), runs=[_shown(label) for label in without])


def _shown(text: str) -> str:
    return NOT_SHOWN.sub("\ufffd", text)


def _points(rows: Sequence[MetricRow], metric: str, across: Across) -> tuple[list[float], list[float]]:
    """Return the horizontal positions and values of a run's finite values of the metric."""
    began = rows[0].time - max(rows[0].metrics.get("timing_s/step", 0.0), 0.0)
    if not math.isfinite(began):
        began = rows[0].time
    found = [
        (float(row.step) if across == "step" else row.time - began, value)
        for row in rows
        if math.isfinite(value := row.metrics.get(metric, math.nan))
    ]
    return [x for x, _ in found], [y for _, y in found]


@contextmanager
def _drawing() -> "Iterator[Figure]":
    """Yield an empty figure with matplotlib's default settings and LOOK, ignoring the user's own."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plots need matplotlib. Install rl-metrics[plot] as the README says.") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK)
        yield Figure(layout="constrained")


def _draw(figure: "Figure", runs: Mapping[str, Sequence[MetricRow]], plot: Plot) -> None:
    width, height = PANEL_INCHES
    figure.set_size_inches(width, height * len(plot.metrics))
    panels = figure.subplots(len(plot.metrics), 1, squeeze=False, sharex=True)[:, 0]
    for panel, metric in zip(panels, plot.metrics, strict=True):
        _draw_panel(panel, metric, runs, plot)
    panels[-1].set_xlabel(ACROSS[plot.across])


def _draw_panel(panel: "Axes", metric: str, runs: Mapping[str, Sequence[MetricRow]], plot: Plot) -> None:
    handles, labels = [], []
    for index, (label, rows) in enumerate(runs.items()):
        xs, ys = _points(rows, metric, plot.across)
        if not xs:
            continue
        color, style = COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]
        marker = "." if len(xs) <= MAX_MARKED else ""
        handles += panel.plot(xs, ys, color=color, linestyle=style, marker=marker, linewidth=1.4)
        labels.append(label)
    lines = [line for line in plot.lines if line.metric in (None, metric)]
    for index, line in enumerate(lines):
        handles.append(panel.axhline(line.value, color="0.35", linewidth=1, linestyle=STYLES[1 + index % 3]))
        labels.append(f"{line.value:g}" if line.label is None else line.label)
    definition = DEFINITIONS.find(metric)
    panel.set_title(_shown(metric), loc="left")
    panel.set_ylabel(definition.unit if definition and definition.unit != "1" else "value")
    if plot.across == "step":
        panel.locator_params(axis="x", integer=True)
    panel.legend(handles, [_shown(label) for label in labels], loc="best")
