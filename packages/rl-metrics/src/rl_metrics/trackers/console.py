"""Console output of a run: a live display in a terminal, plain lines elsewhere, JSON objects for programs."""

import atexit
import io
import json
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Literal, cast

import structlog
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment, Segments
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rl_core.data import encodable_json
from rl_core.terminal_text import escaped, escaped_lines
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import as_plain, json_text
from rl_metrics.trackers.text import plain_text
from rl_metrics.validation.summary import MAIN_VARIABLES, headline

log = structlog.get_logger(__name__)

ConsoleKind = Literal["auto", "bar", "lines", "quiet", "json", "off"]
"""Kind of output, in order: "bar" in a terminal and else "lines"; live display; lines; findings and end; JSON; none."""

Row = tuple[str, str]
"""A label and a value, such as ("reward", "0.912")."""

TICK_S = 0.5
"""Seconds between redraws of the display, and between checks for slow phases."""

REMIND_AFTER_S = 30.0
"""Seconds after which a running phase gets a reminder; repeated whenever its duration doubles."""

MAX_ROWS = 6
"""Maximum number of steps in the live table."""

OTHER_LINES = 8
"""Terminal lines reserved for the rest of the display and for scrolling text above it."""

MIN_DRAW_S = 0.25
"""Minimum seconds between redraws, except those of ticks."""

FIRST = ("step", "reward", "validation")
"""First columns of the live table, in order."""

STYLES = {
    "step": "bold",
    "reward": "cyan",
    "loss": "cyan",
    "validation": "bold green",
    "speed": "dim",
    "step time": "dim",
}
"""Styles of the live table's columns."""

MAX_WRONG, MAX_RIGHT = 3, 1
"""Maximum number of samples shown, one line each, so that the run's own lines stay visible."""

MAX_TEXT, MAX_FAILURE = 60, 120
"""Maximum number of shown characters of a sample's text and of a failure's reason."""

VERDICT_STYLES = {"failed": "bold red", "wrong": "red", "right": "green"}

MAX_QUEUED = 1000
"""Maximum number of queued writes to standard output; further ones are dropped."""

DRAIN_S = 2.0
"""Maximum wait for queued writes at the end, in seconds."""

SETTLE_S = 0.5
"""Maximum wait for the terminal before others write to it, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A value of each step that the console shows.

    Attributes:
        label: Label, such as "kl".
        names: Metrics; the first that the step has is shown.
        format: Format specification, such as ".3f".
        unit: Unit shown after the value.
        is_extra: Whether the live display shows it only if there is room; lines always have it.
    """

    label: str
    names: tuple[str, ...]
    format: str = ".3f"
    unit: str = ""
    is_extra: bool = False


READINGS = (
    Reading(label="loss", names=("sft/loss",), format=".4f"),
    Reading(label="reward", names=("critic/rewards/mean", "critic/score/mean")),
    Reading(label="kl", names=("actor/kl_loss", "actor/reference_kl", "actor/ppo_kl", "rollout_corr/kl"), format=".2g"),
    Reading(label="entropy", names=("actor/entropy",)),
    Reading(label="replayed", names=("rollout/replayed",), format=".0%"),
    Reading(label="speed", names=("perf/throughput", "sft/throughput"), format=",.0f", unit=" tok/s"),
    Reading(label="step time", names=("perf/time_per_step",), format=".3g", unit=" s", is_extra=True),
    Reading(label="grad norm", names=("actor/grad_norm", "sft/grad_norm"), format=".3g", is_extra=True),
    Reading(label="response", names=("response_length/mean",), format=".0f", unit=" tok", is_extra=True),
    Reading(label="loss", names=("actor/loss",), format=".3g", is_extra=True),
    Reading(label="advantages", names=("critic/advantages/mean",), format=".2g", is_extra=True),
    Reading(label="cut", names=("response_length/clip_ratio",), format=".0%", is_extra=True),
    Reading(label="clipped", names=("actor/pg_clipfrac",), format=".1%", is_extra=True),
    Reading(label="staleness", names=("training/staleness/mean",), format=".2f", is_extra=True),
    Reading(label="lr", names=("actor/lr", "sft/lr"), format=".2g", is_extra=True),
)
"""Default readings of the console, in addition to the newest validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """State of a bar of steps.

    Attributes:
        title: Title of the running part, such as "GRPO".
        step: Number of finished steps.
        total_steps: Number of steps in total.
        readings: The most important readings of the step.
        more: Further readings, which the live display shows if there is room.
        metrics: All metrics of the step.
        step_s: Mean seconds of a step so far; None if unknown.
        eta: Time left, such as "1:05"; "" if unknown.
        validation: Validation of this step, such as "0.968"; None without one.
    """

    title: str
    step: int
    total_steps: int
    readings: tuple[Row, ...] = ()
    more: tuple[Row, ...] = ()
    metrics: Mapping[str, float]
    step_s: float | None = None
    eta: str = ""
    validation: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Phase:
    """A slow phase.

    Attributes:
        text: Name of the phase, such as "starting vLLM".
        began_s: Start time by the console's clock, in seconds.
        is_brief: Whether it is part of a step, which gets no lines of its own unless it takes long.
        detail: Returns the progress; "" if unknown.
        remind_after_s: Duration at which plain lines mention it next, in seconds.
    """

    text: str
    began_s: float
    is_brief: bool
    detail: Callable[[], str]
    remind_after_s: float = REMIND_AFTER_S

    def progress(self, now_s: float) -> str:
        """Return the progress, such as `starting vLLM ... 12 s, 3 of 8 groups ready`."""
        detail = self.detail()
        return f"{self.text} ... {now_s - self.began_s:.0f} s" + (f", {detail}" if detail else "")


class ConsoleTracker:
    """Shows a run: a live display in a terminal, plain lines otherwise.

    It never stops a run: if the terminal is gone or cannot show something, it warns once and is silent afterwards. It
    never delays a run: a thread writes standard output, and drops what a terminal does not accept.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        kind: ConsoleKind = "auto",
        readings: Sequence[Reading] = READINGS,
        hidden: Collection[str] = (),
        generations_in: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a console without writing.

        Args:
            console: Destination; None opens standard output.
            kind: Kind of output.
            readings: Values to show of each step.
            hidden: Metrics that are 0 by design in this run. A live display hides them; lines, which people search by
                the main labels, have the main ones as 0.
            generations_in: File with all samples of a table, such as "generations.jsonl".
            clock: Returns seconds.
        """
        self._phases: list[Phase] = []
        target = console if console is not None or kind == "off" else _standard_output(kind)
        self._output = target.file if target is not None and isinstance(target.file, OutputThread) else None
        self._view: LinesView | LiveView | None = None
        if target is not None and kind != "off":
            is_live = kind in ("auto", "bar") and target.is_interactive and not target.options.ascii_only
            self._view = (
                LiveView(target, self._phases, clock=clock)
                if is_live
                else LinesView(target, self._phases, kind=kind, clock=clock)
            )
        self._readings = tuple(readings)
        self._hidden = frozenset(hidden)
        self._generations_in = generations_in
        self._clock = clock
        self._lock = threading.RLock()
        self._ticker: threading.Thread | None = None
        self._is_closed = threading.Event()
        self._shown_tables: set[str] = set()
        self._title = "training"
        self._total_steps = 0
        self._first_step = 0
        self._began_s: float | None = None
        self._validation: float | None = None

    def say(self, text: str, *, style: str = "") -> None:
        """Write permanent lines.

        Args:
            text: Text to write.
            style: Style of rich, such as "yellow"; styled text is also shown with kind "quiet".
        """
        line = Text(escaped_lines(text), style=style)
        self._draw(lambda view: view.say(line))

    @contextmanager
    def phase(self, text: str, *, is_brief: bool = False, detail: Callable[[], str] = str) -> Iterator[None]:
        """Show that a slow phase runs, and its duration at the end, even if it fails or is interrupted.

        Args:
            text: Name of the phase, such as "starting vLLM".
            is_brief: Whether it is part of a step, and shown only while it runs.
            detail: Returns the progress, such as "3 of 8 groups ready"; called twice a second from another thread.
        """
        phase = Phase(text=escaped(text), began_s=self._clock(), is_brief=is_brief, detail=lambda: escaped(detail()))
        self._phases.append(phase)
        self._draw(lambda view: view.phase_began(phase))
        self._start_ticker()
        outcome = "interrupted after "
        try:
            yield
            outcome = ""
        finally:
            self._phases.remove(phase)
            outcome += f"{self._clock() - phase.began_s:.1f} s"
            self._draw(lambda view: view.phase_ended(phase, outcome))

    def running(self) -> list[str]:
        """Return the running phases, such as `starting vLLM ... 12 s`."""
        return [phase.progress(self._clock()) for phase in tuple(self._phases)]

    def begin(self, title: str, *, total_steps: int, done_steps: int = 0) -> None:
        """Start a bar of steps, and end the previous one.

        Args:
            title: Title, such as "warm start" or "GRPO".
            total_steps: Number of the last step.
            done_steps: Number of steps done before, in a resumed run.
        """
        self._title, self._total_steps = escaped(title), total_steps
        self._first_step, self._began_s = done_steps, self._clock()
        report = StepReport(title=self._title, step=done_steps, total_steps=total_steps, metrics={})
        self._draw(lambda view: view.progress_began(report))
        self._start_ticker()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step: its readings, its validation if any, and the time left."""
        if self._began_s is None:
            self._first_step, self._began_s = step - 1, self._clock()
        validation = headline(metrics)
        self._validation = self._validation if validation is None else validation
        newest = () if self._validation is None else (("validation", f"{self._validation:.3f}"),)
        num_done, num_left = step - self._first_step, self._total_steps - step
        step_s = (self._clock() - self._began_s) / num_done if num_done > 0 else None
        report = StepReport(
            title=self._title,
            step=step,
            total_steps=max(self._total_steps, step),
            readings=(*self._read(metrics, is_extra=False), *newest),
            more=tuple(self._read(metrics, is_extra=True)),
            metrics=metrics,
            step_s=step_s,
            eta="" if step_s is None or num_left <= 0 else duration_text(step_s * num_left),
            validation=None if validation is None else f"{validation:.3f}",
        )
        self._draw(lambda view: view.stepped(report))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished validation; other late metrics are not shown."""
        validation = headline(metrics)
        if validation is not None:
            self._validation = validation
            self.say(f"validation of step {step}: {validation:.3f}")

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Show a few samples of a name's first and last table, wrong ones first, and the file with all of them.

        Without `begin`, each table may be the last, so all are shown.
        """
        is_first = name not in self._shown_tables and not self._first_step
        self._shown_tables.add(name)
        if is_first or step >= self._total_steps:
            title = escaped(f"{name.removesuffix('/generations')} at step {step}")
            lines = sample_lines(title, samples, file=self._generations_in)
            self._draw(lambda view: [view.say(line) for line in lines])

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Show nothing, because a distribution does not fit a line of text."""

    def end(self) -> None:
        """End the bar of steps. Idempotent."""
        self._began_s = None
        self._draw(lambda view: view.progress_ended())

    def summary(self, title: str, rows: Mapping[str, object], *, notes: Mapping[str, str] | None = None) -> None:
        """End the bar and show a table of results and locations of files.

        Args:
            title: Title, such as "run finished".
            rows: Values by name; floats are shown with four digits.
            notes: Notes after values, by name of the value.
        """
        self.end()
        texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in rows.items()}
        texts |= {name: f"{texts[name]}  {note}" for name, note in (notes or {}).items() if name in texts}
        cells = [(escaped(name), escaped(text)) for name, text in texts.items()]
        self._draw(lambda view: view.table(escaped(title), rows, cells))

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        self._is_closed.set()
        self._draw(lambda view: view.close())
        if self._output is not None:
            self._output.drain()

    def _read(self, metrics: Mapping[str, float], *, is_extra: bool) -> Iterator[Row]:
        has_zeros = not is_extra and not isinstance(self._view, LiveView)
        for reading in self._readings:
            known = [name for name in reading.names if name in metrics]
            names = [name for name in known if name not in self._hidden]
            if reading.is_extra == is_extra and (names or (known and has_zeros)):
                value = metrics[names[0]] if names else 0.0
                yield reading.label, f"{value:{reading.format}}{reading.unit}"

    def _start_ticker(self) -> None:
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="console", daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        while not self._is_closed.wait(TICK_S):
            self._draw(lambda view: view.tick())

    def _draw(self, draw: "Callable[[LinesView | LiveView], object]") -> None:
        with self._lock:
            view = self._view
            if view is None:
                return
            try:
                draw(view)
            except Exception as error:
                self._view = None
                with suppress(Exception):
                    view.close()
                with suppress(OSError):  # standard error is gone too
                    log.warning("console_failed", error=f"{type(error).__name__}: {error}")


class LinesView:
    """Lines for files and programs: text, or one JSON object with `event` and `time` per line.

    Text has one line per step with all its readings, so that `grep` and `awk` find every step. Kind "quiet" writes
    only messages with a style and the summary.
    """

    def __init__(self, console: Console, phases: list[Phase], *, kind: ConsoleKind, clock: Callable[[], float]) -> None:
        """Create a view of a console and of the running phases."""
        self._console = console
        self._phases = phases
        self._kind = kind
        self._clock = clock

    def say(self, text: Text) -> None:
        """Write a message."""
        self._write("message", text, is_result=bool(text.style), text=text.plain)

    def phase_began(self, phase: Phase) -> None:
        """Write a line such as `starting vLLM ...`; none for parts of steps, whose times are metrics."""
        if not phase.is_brief:
            self._write("phase_began", f"{phase.text} ...", phase=phase.text)

    def phase_ended(self, phase: Phase, outcome: str) -> None:
        """Write a line such as `starting vLLM: 7.8 s`, with the outcome "7.8 s"."""
        if not phase.is_brief:
            self._write("phase_ended", f"{phase.text}: {outcome}", phase=phase.text, outcome=outcome)

    def progress_began(self, report: StepReport) -> None:
        """Write a line such as `GRPO: 20 steps`, with the steps done before if resumed."""
        text = f"{report.title}: {report.total_steps} steps"
        text += f", {report.step} done before" if report.step else ""
        self._write("began", text, title=report.title, total_steps=report.total_steps, done_steps=report.step)

    def stepped(self, report: StepReport) -> None:
        """Write the readings of a step; as JSON, all metrics."""
        readings = "".join(f"  {label} {value}" for label, value in (*report.readings, *report.more))
        text = f"{report.title} {report.step}/{report.total_steps}{readings}"
        text += f"  eta {report.eta}" if report.eta else ""
        self._write("step", text, step=report.step, total_steps=report.total_steps, metrics=report.metrics)

    def progress_ended(self) -> None:
        """Write nothing."""

    def table(self, title: str, rows: Mapping[str, Any], cells: Sequence[Row]) -> None:
        """Write aligned `name  value` lines."""
        width = max((len(name) for name, _ in cells), default=0)
        text = "\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in cells)])
        self._write("summary", text, is_result=True, title=title, rows=rows)

    def tick(self) -> None:
        """Write a reminder for each phase that takes long."""
        now = self._clock()
        for phase in tuple(self._phases) if self._kind not in ("json", "quiet") else ():
            if now - phase.began_s >= phase.remind_after_s:
                phase.remind_after_s *= 2
                self._write("message", f"still {phase.progress(now)}")

    def close(self) -> None:
        """Write nothing."""

    def _write(self, event: str, line: Text | str, *, is_result: bool = False, **fields: Any) -> None:
        if self._kind == "json":
            content = as_plain({"event": event, "time": time.time(), **fields})
            line = json.dumps(encodable_json(content)).replace("\x7f", "\\u007f")
        if is_result or self._kind != "quiet":
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveView:
    """A display at the bottom of a terminal: the last steps, a bar and the running phases; other lines scroll above."""

    def __init__(self, console: Console, phases: list[Phase], *, clock: Callable[[], float]) -> None:
        """Create a view of a console that is a terminal, and of the running phases."""
        self._console = console
        self._phases = phases
        self._clock = clock
        self._live: Live | None = None
        self._report: StepReport | None = None
        self._rows: deque[dict[str, str]] = deque(maxlen=MAX_ROWS)
        self._validation = ""
        self._spinner = Spinner("dots")
        self._drawn: tuple[int, list[int]] = (0, [])
        self._drawn_s = 0.0

    def say(self, text: Text) -> None:
        """Write lines above the display."""
        self._erase_wrapped()
        self._console.print(text, markup=False, highlight=False, emoji=False)

    def phase_began(self, phase: Phase) -> None:  # noqa: ARG002 - the display shows all running phases
        """Show a spinner with the elapsed time."""
        self._show()

    def phase_ended(self, phase: Phase, outcome: str) -> None:
        """Write a line for the phase, unless it was part of a step."""
        if not phase.is_brief and self._report is None:
            self.say(Text.assemble(phase.text, (f": {outcome}", "dim")))
        self._show()

    def progress_began(self, report: StepReport) -> None:
        """Start a new bar."""
        self.progress_ended()
        self._report = report
        self._show()

    def stepped(self, report: StepReport) -> None:
        """Move the bar; a validation also gets a permanent line."""
        self._rows.append(self._cells(report))
        self._report = report
        if report.validation is not None:
            line = f"{report.title} {report.step}/{report.total_steps}  validation "
            self.say(Text.assemble(line, (report.validation, "bold green")))
        self._show()

    def progress_ended(self) -> None:
        """Leave table and bar on the screen. Idempotent."""
        if self._report is not None:
            self._stop(is_kept=True)
            self._report = None
            self._rows.clear()
            self._show()

    def table(self, title: str, rows: Mapping[str, Any], cells: Sequence[Row]) -> None:  # noqa: ARG002
        """Write a table, with long values wrapped."""
        table = Table(
            title=title, title_justify="left", title_style="bold green", show_header=False, box=None, padding=(0, 2)
        )
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in cells:
            table.add_row(Text(name), Text(value))
        self._console.print(table)

    def tick(self) -> None:
        """Redraw the display."""
        if self._live is not None:
            self._drawn_s = self._clock()
            self._erase_wrapped()
            self._live.refresh()

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        self._stop(is_kept=self._report is not None)
        self._report = None

    def _show(self) -> None:
        if self._report is None and not self._phases:
            self._stop(is_kept=False)
        elif self._live is None:
            self._live = Live(get_renderable=self._rendered, console=self._console, auto_refresh=False)
            self._live.start()
            self.tick()
        elif self._clock() - self._drawn_s >= MIN_DRAW_S:
            self.tick()  # else the next tick shows it, because a step may be as fast as a redraw

    def _stop(self, *, is_kept: bool) -> None:
        if self._live is None:
            return
        self._erase_wrapped()
        live, self._live = self._live, None
        live.transient = not is_kept
        live.stop()
        self._drawn = 0, []
        if isinstance(self._console.file, OutputThread):
            self._console.file.drain(SETTLE_S)  # otherwise others write before the display is erased

    def _rendered(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._report is not None:
            parts += [self._table()] if self._rows else []
            parts.append(self._bar(self._report))
        if self._live is not None:
            now = self._clock()
            frame = f"{self._spinner.render(now)} "
            phases = [frame + phase.progress(now) for phase in tuple(self._phases)]
            # An empty line keeps the display's height between the parts of a step.
            parts += [Text(phase, overflow="ellipsis", no_wrap=True) for phase in phases or [" "]]
        lines = self._console.render_lines(Group(*parts), pad=False)
        self._drawn = self._console.width, [Segment.get_line_length(line) for line in lines]
        ended = [[Segment.line(), *line] if index else line for index, line in enumerate(lines)]
        return Segments([segment for line in ended for segment in line])

    def _erase_wrapped(self) -> None:
        """Erase the extra rows of a display wrapped by a narrowed terminal, which rich does not count."""
        before, lengths = self._drawn
        width = self._console.width
        if width < before:
            extra = sum((length - 1) // width for length in lengths if length)
            up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * extra
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up))
            self._drawn = width, lengths

    def _table(self) -> Table:
        """Return the last steps, with as many columns as fit, most important first."""
        rows = list(self._rows)[-max(1, self._console.height - OTHER_LINES) :]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        room = self._console.width
        names = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
        for name in sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
            width = max(len(name), *(len(row.get(name, "")) for row in rows)) + 2
            if width > room:
                break
            room -= width
            table.add_column(name, justify="right", style=STYLES.get(name, ""), no_wrap=True)
        for row in rows:
            table.add_row(*(row.get(str(column.header), "") for column in table.columns))
        return table

    def _cells(self, report: StepReport) -> dict[str, str]:
        """Return a row; the validation is shown only if it is new."""
        cells = {"step": str(report.step), **dict(report.readings), **dict(report.more)}
        before, self._validation = self._validation, cells.get("validation", "")
        if before and report.validation is None and self._validation == before:
            cells["validation"] = ""
        return cells

    def _bar(self, report: StepReport) -> RenderableType:
        rate = "" if report.step_s is None else f"{report.step_s:.3g} s/step"
        eta = f"eta {report.eta}" if report.eta else ""
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(ratio=1)
        bar = ProgressBar(total=max(report.total_steps, 1), completed=report.step)
        cells: list[RenderableType] = [Text(report.title), bar]
        for text, style in ((f"{report.step}/{report.total_steps}", "bold"), (rate, "cyan"), (eta, "yellow")):
            if text:
                grid.add_column(no_wrap=True)
                cells.append(Text(text, style=style))
        grid.add_row(*cells)
        return grid


def sample_lines(title: str, samples: Sequence[GenerationSample], *, file: str | None) -> list[Text]:
    """Return a heading, the worst samples that are not right, and one that is.

    Args:
        title: Title of the samples, such as "validation at step 0".
        samples: Samples of one validation.
        file: File with all samples; None shows no file.
    """
    ranked = sorted(samples, key=_goodness)
    verdicts = [_verdict(sample) for sample in ranked]
    right = [sample for sample, verdict in zip(ranked, verdicts, strict=True) if verdict == "right"]
    others = [sample for sample, verdict in zip(ranked, verdicts, strict=True) if verdict != "right"]
    heading = f"{title}: {len(samples)} samples"
    heading += f", {len(others)} wrong" if VERDICT_STYLES.keys() >= set(verdicts) else ", worst first"
    if (len(others) > MAX_WRONG or len(right) > MAX_RIGHT) and file is not None:
        heading += f"; all are in {file}"
    return [Text(heading), *map(_sample_line, (*others[:MAX_WRONG], *right[:MAX_RIGHT]))]


def _sample_line(sample: GenerationSample) -> Text:
    verdict = _verdict(sample)
    text = f" {plain_text(sample.input, limit=MAX_TEXT)} -> {plain_text(sample.output, limit=MAX_TEXT)}"
    if (truth := json_text(sample.ground_truth)) is not None:
        text += f"  expected {plain_text(truth, limit=MAX_TEXT)}"
    if sample.failure is not None:
        text += f"  {plain_text(sample.failure, limit=MAX_FAILURE)}"
    return Text.assemble("  ", (f"{verdict}:", VERDICT_STYLES.get(verdict, "yellow")), text)


def _verdict(sample: GenerationSample) -> str:
    """Return right or wrong if that is clear, else the score, whose scale is unknown here."""
    if sample.failure is not None:
        return "failed"
    value = _main_value(sample)
    if value <= 0:
        return "wrong"
    return "right" if value == 1 else f"score {value:.3g}"


def _main_value(sample: GenerationSample) -> float:
    values = {"reward": sample.score, **sample.components}
    return next(values[name] for name in MAIN_VARIABLES if name in values)


def _goodness(sample: GenerationSample) -> tuple[bool, float]:
    """Return a sort key: failed sessions first, then by score."""
    value = _main_value(sample)
    return sample.failure is None, -math.inf if math.isnan(value) else value


class RunConsole(Console):
    """A rich console that becomes silent, instead of ending the program, if its reader is gone."""

    def on_broken_pipe(self) -> None:
        """Stop all output, also of the underlying file; rich would raise SystemExit."""
        self.quiet = True
        try:
            target = self.file.fileno()
        except (io.UnsupportedOperation, ValueError):
            return
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, target)
        os.close(devnull)


class OutputThread(io.TextIOBase):
    """A text stream whose writes are made by its own thread, in order.

    So a paused terminal (Ctrl-S) or a pipe that nobody reads never blocks a run. The next write raises an error of the
    thread, once. A killed process loses writes that are still queued.
    """

    def __init__(self, descriptor: int, *, encoding: str = "utf-8", errors: str = "strict") -> None:
        """Start the thread.

        Args:
            descriptor: Descriptor of an open file, pipe or terminal; never closed.
            encoding: Encoding of the text.
            errors: Handling of characters that the encoding lacks, as in `str.encode`.
        """
        self._descriptor = descriptor
        self._encoding = encoding
        self._errors = errors
        self._writes: queue.Queue[bytes] = queue.Queue(MAX_QUEUED)
        self._error: OSError | None = None
        self.num_dropped = 0
        threading.Thread(target=self._work, name="console-output", daemon=True).start()
        atexit.register(self.drain)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the text."""
        return self._encoding

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return True for a terminal."""
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Queue text; drop it if the queue is full.

        Raises:
            OSError: An error of the thread, such as a pipe without a reader.
            UnicodeEncodeError: The encoding lacks a character of the text.
        """
        content = text.encode(self._encoding, self._errors)
        error, self._error = self._error, None
        if error is not None:
            raise error
        try:
            self._writes.put_nowait(content)
        except queue.Full:
            self.num_dropped += 1
        return len(text)

    def drain(self, deadline_s: float = DRAIN_S) -> bool:
        """Wait until everything is written, or for the deadline; return whether it is."""
        with self._writes.all_tasks_done:
            return self._writes.all_tasks_done.wait_for(lambda: not self._writes.unfinished_tasks, deadline_s)

    def _work(self) -> None:
        while True:
            content = memoryview(self._writes.get())
            try:
                while content:
                    content = content[os.write(self._descriptor, content) :]
            except OSError as error:
                self._error = error
            self._writes.task_done()


def unhurried_stdout() -> OutputThread | None:
    """Return standard output through a thread, or None if it has no descriptor, as in a notebook or a test."""
    stream = sys.stdout
    if stream is not sys.__stdout__ or stream is None:
        return None
    try:
        stream.flush()
        return OutputThread(stream.fileno(), encoding=stream.encoding, errors=stream.errors or "strict")
    except (OSError, ValueError):
        return None


def _standard_output(kind: ConsoleKind) -> Console:
    is_forced = None if kind == "auto" else kind == "bar"
    file = cast("IO[str] | None", unhurried_stdout())
    target = RunConsole(file=file, force_terminal=is_forced, force_interactive=is_forced)
    if kind == "auto" and not target.file.isatty():  # FORCE_COLOR does not turn a file into a terminal
        target.is_interactive = False
    return target


def duration_text(seconds: float) -> str:
    """Return a duration such as `42 s`, `3:05` or `1:02:03`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
