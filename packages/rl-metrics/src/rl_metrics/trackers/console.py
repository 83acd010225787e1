"""Console output of a run: a live display in a terminal, plain lines elsewhere, JSON objects for programs."""

import atexit
import functools
import io
import json
import math
import operator
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Concatenate, Literal, ParamSpec, cast

import structlog
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rl_core.data import encodable_json
from rl_core.terminal_text import escaped, escaped_lines
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import as_plain, json_text
from rl_metrics.validation.summary import MAIN_VARIABLES, headline

log = structlog.get_logger(__name__)

P = ParamSpec("P")

ConsoleKind = Literal["auto", "bar", "lines", "quiet", "json", "off"]
"""Kind of output, in order: "bar" in a terminal and else "lines"; live display; lines; findings and end; JSON; none."""

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

GAP = " ... "
"""Replaces the middle of a long text."""

VERDICT_STYLES = {"failed": "bold red", "wrong": "red", "right": "green"}

MAX_QUEUED = 1000
"""Maximum number of queued writes to standard output; further ones are dropped."""

DRAIN_S = 2.0
"""Maximum wait for queued writes at the end, in seconds."""

SETTLE_S = 0.5
"""Maximum wait for the terminal before others write to it, in seconds."""

READINGS = (
    ("loss", "{:.4f}", "sft/loss"),
    ("validation loss", "{:.4f}", "sft/validation_loss"),
    ("reward", "{:.3f}", "critic/rewards/mean", "critic/score/mean"),
    ("kl", "{:.2g}", "actor/kl_loss", "actor/reference_kl", "actor/ppo_kl", "rollout_corr/kl"),
    ("entropy", "{:.3f}", "actor/entropy"),
    ("replayed", "{:.0%}", "rollout/replayed"),
    ("speed", "{:,.0f} tok/s", "perf/throughput"),
)
"""Label, format and metrics of each shown value of a step; the first metric that the step has is shown."""

MORE_READINGS = (
    ("step time", "{:.3g} s", "perf/time_per_step"),
    ("grad norm", "{:.3g}", "actor/grad_norm", "sft/grad_norm"),
    ("response", "{:.0f} tok", "response_length/mean"),
    ("loss", "{:.3g}", "actor/loss"),
    ("advantages", "{:.2g}", "critic/advantages/mean"),
    ("cut", "{:.0%}", "response_length/clip_ratio"),
    ("clipped", "{:.1%}", "actor/pg_clipfrac"),
    ("staleness", "{:.2f}", "training/staleness/mean"),
    ("lr", "{:.2g}", "actor/lr", "sft/lr"),
)
"""Further values, which the live display shows if there is room; lines always have them."""


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
        detail = escaped(self.detail())
        return f"{self.text} ... {now_s - self.began_s:.0f} s" + (f", {detail}" if detail else "")


def _never_stops(draw: Callable[Concatenate["ConsoleTracker", P], None]) -> Callable[Concatenate[Any, P], None]:
    """Draw unless the console has failed; its first error causes a warning instead of an exception."""

    @functools.wraps(draw)
    def guarded(console: "ConsoleTracker", /, *args: P.args, **kwargs: P.kwargs) -> None:
        with console._lock:
            if console._has_failed:
                return
            try:
                draw(console, *args, **kwargs)
            except Exception as error:
                console._has_failed = True
                with suppress(Exception):
                    console._display.stop(is_kept=True)
                with suppress(OSError):  # standard error is gone too
                    log.warning("console_failed", error=f"{type(error).__name__}: {error}")

    return guarded


class ConsoleTracker:
    """Shows a run: a live display in a terminal; otherwise text, or one JSON object with `event` and `time`, per line.

    Text has one line per step with all its readings, so that `grep` and `awk` find every step. Kind "quiet" writes
    only messages with a style and the summary.

    It never stops a run: if the terminal is gone or cannot show something, it warns once and is silent afterwards. It
    never delays a run: a thread writes standard output, and drops what a terminal does not accept.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        kind: ConsoleKind = "auto",
        hidden: Collection[str] = (),
        generations_in: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a console without writing.

        Args:
            console: Destination; None opens standard output.
            kind: Kind of output.
            hidden: Metrics that are 0 by design in this run. A live display hides them; lines, which people search by
                the main labels, have the main ones as 0.
            generations_in: File with all samples of a table, such as "generations.jsonl".
            clock: Returns seconds.
        """
        if kind == "off":
            console = Console(quiet=True)
        self._console = _standard_output(kind) if console is None else console
        self._kind = kind
        self._hidden = frozenset(hidden)
        self._generations_in = generations_in
        self._clock = clock
        self._phases: list[Phase] = []
        self._display = LiveDisplay(self._console, self._phases, clock=clock)
        can_draw = self._console.is_interactive and not self._console.options.ascii_only
        self._is_live = kind in ("auto", "bar") and can_draw
        self._lock = threading.RLock()
        self._has_failed = False
        self._is_closed = threading.Event()
        self._shown_tables: set[str] = set()
        self._title = "training"
        self._total_steps = 0
        self._first_step = 0
        self._began_s: float | None = None
        self._validation = ""
        self._is_validation_new = False
        threading.Thread(target=self._tick_until_closed, name="console", daemon=True).start()

    @_never_stops
    def say(self, text: str, *, style: str = "") -> None:
        """Write permanent lines.

        Args:
            text: Text to write.
            style: Style of rich, such as "yellow"; styled text is also shown with kind "quiet".
        """
        self._say(Text(escaped_lines(text), style=style))

    @contextmanager
    def phase(self, text: str, *, is_brief: bool = False, detail: Callable[[], str] = str) -> Iterator[None]:
        """Show that a slow phase runs, and its duration at the end, even if it fails or is interrupted.

        Args:
            text: Name of the phase, such as "starting vLLM".
            is_brief: Whether it is part of a step, and shown only while it runs.
            detail: Returns the progress, such as "3 of 8 groups ready"; called twice a second from another thread.
        """
        phase = Phase(text=escaped(text), began_s=self._clock(), is_brief=is_brief, detail=detail)
        self._phases.append(phase)
        self._show_phase(phase)
        outcome = "interrupted after "
        try:
            yield
            outcome = ""
        finally:
            self._phases.remove(phase)
            self._show_phase(phase, f"{outcome}{self._clock() - phase.began_s:.1f} s")

    def running(self) -> list[str]:
        """Return the running phases, such as `starting vLLM ... 12 s`."""
        return [phase.progress(self._clock()) for phase in tuple(self._phases)]

    @_never_stops
    def begin(self, title: str, *, total_steps: int, done_steps: int = 0) -> None:
        """Start a bar of steps, and end the previous one.

        Args:
            title: Title, such as "warm start" or "GRPO".
            total_steps: Number of the last step.
            done_steps: Number of steps done before, in a resumed run.
        """
        self._title, self._total_steps = escaped(title), total_steps
        self._first_step, self._began_s = done_steps, self._clock()
        if self._is_live:
            self._display.end_bar()
            self._display.show(bar=_bar(self._title, done_steps, total_steps))
        else:
            text = f"{self._title}: {total_steps} steps" + (f", {done_steps} done before" if done_steps else "")
            self._write("began", text, title=self._title, total_steps=total_steps, done_steps=done_steps)

    @_never_stops
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step: its readings, its validation if any, and the time left."""
        if self._began_s is None:
            self._first_step, self._began_s = step - 1, self._clock()
        validation = self._take_validation(metrics)
        is_new, self._is_validation_new = self._is_validation_new, False
        total_steps, num_done = max(self._total_steps, step), step - self._first_step
        step_s = (self._clock() - self._began_s) / num_done if num_done > 0 else None
        eta = "" if step_s is None or step == total_steps else f"eta {duration_text(step_s * (total_steps - step))}"
        readings = self._read(metrics, READINGS, has_zeros=not self._is_live)
        if self._validation:
            readings["validation"] = self._validation if is_new or not self._is_live else ""
        more = self._read(metrics, MORE_READINGS)
        if self._is_live:
            if validation:
                self._say(Text.assemble(f"{self._title} {step}/{total_steps}  validation ", (validation, "bold green")))
            self._display.rows.append({"step": str(step), **readings, **more})
            rate = "" if step_s is None else f"{step_s:.3g} s/step"
            self._display.show(bar=_bar(self._title, step, total_steps, rate=rate, eta=eta))
        else:
            values = (f"{label} {value}" for label, value in (*readings.items(), *more.items()))
            text = "  ".join(filter(None, (f"{self._title} {step}/{total_steps}", *values, eta)))
            self._write("step", text, step=step, total_steps=total_steps, metrics=metrics)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished validation; other late metrics are not shown."""
        if validation := self._take_validation(metrics):
            self.say(f"validation of step {step}: {validation}")

    @_never_stops
    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Show a few samples of a name's first and last table, wrong ones first, and the file with all of them.

        Without `begin`, each table may be the last, so all are shown.
        """
        is_first = name not in self._shown_tables and not self._first_step
        self._shown_tables.add(name)
        if is_first or step >= self._total_steps:
            title = escaped(f"{name.removesuffix('/generations')} at step {step}")
            for line in sample_lines(title, samples, file=self._generations_in):
                self._say(line)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Show nothing, because a distribution does not fit a line of text."""

    @_never_stops
    def end(self) -> None:
        """End the bar of steps. Idempotent."""
        self._began_s = None
        self._display.end_bar()

    @_never_stops
    def summary(self, title: str, rows: Mapping[str, object], *, notes: Mapping[str, str] | None = None) -> None:
        """End the bar and show a table of results and locations of files.

        Args:
            title: Title, such as "run finished".
            rows: Values by name; floats are shown with four digits.
            notes: Notes after values, by name of the value.
        """
        self.end()
        title = escaped(title)
        texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in rows.items()}
        texts |= {name: f"{texts[name]}  {note}" for name, note in (notes or {}).items() if name in texts}
        cells = [(escaped(name), escaped(text)) for name, text in texts.items()]
        width = max((len(name) for name, _ in cells), default=0)
        parts = [part for name, value in cells for part in ("\n  ", (name.ljust(width), "bold"), f"  {value}")]
        self._write("summary", Text.assemble((title, "bold green"), *parts), is_result=True, title=title, rows=rows)

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        self._is_closed.set()
        self._restore()
        if isinstance(self._console.file, OutputThread):
            self._console.file.drain()

    @_never_stops
    def _restore(self) -> None:
        self._display.stop(is_kept=self._display.bar is not None)
        self._display.bar = None

    @_never_stops
    def _show_phase(self, phase: Phase, outcome: str = "") -> None:
        """Show the beginning or the outcome of a phase; parts of steps have no lines, as their times are metrics."""
        if outcome and not phase.is_brief and self._display.bar is None:
            line = Text.assemble(phase.text, (f": {outcome}", "dim"))
            self._write("phase_ended", line, phase=phase.text, outcome=outcome)
        elif not outcome and not phase.is_brief and not self._is_live:
            self._write("phase_began", f"{phase.text} ...", phase=phase.text)
        if self._is_live:
            self._display.show()

    def _say(self, line: Text) -> None:
        self._write("message", line, is_result=bool(line.style), text=line.plain)

    def _write(self, event: str, line: Text | str, *, is_result: bool = False, **fields: Any) -> None:
        """Write permanent lines; as JSON, an object with these fields."""
        if self._kind == "json":
            content = as_plain({"event": event, "time": time.time(), **fields})
            line = json.dumps(encodable_json(content)).replace("\x7f", "\\u007f")
        if is_result or self._kind != "quiet":
            self._display.erase_wrapped()
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=not self._is_live)

    def _take_validation(self, metrics: Mapping[str, float]) -> str:
        """Return the validation in the metrics, such as "0.968", which stays the newest; "" without one."""
        value = headline(metrics)
        if value is None:
            return ""
        self._validation, self._is_validation_new = f"{value:.3f}", True
        return self._validation

    def _read(
        self, metrics: Mapping[str, float], readings: Sequence[tuple[str, ...]], *, has_zeros: bool = False
    ) -> dict[str, str]:
        """Return the values of readings by label; with `has_zeros`, 0 for hidden ones."""
        texts: dict[str, str] = {}
        for label, form, *names in readings:
            known = [name for name in names if name in metrics]
            visible = [name for name in known if name not in self._hidden]
            if visible or (known and has_zeros):
                texts[label] = form.format(metrics[visible[0]] if visible else 0.0)
        return texts

    def _tick_until_closed(self) -> None:
        while not self._is_closed.wait(TICK_S):
            self._tick()

    @_never_stops
    def _tick(self) -> None:
        """Redraw the display, or write a reminder for each phase that takes long."""
        now = self._clock()
        if self._is_live:
            self._display.tick()
            return
        for phase in tuple(self._phases) if self._kind != "json" else ():
            if now - phase.began_s >= phase.remind_after_s:
                phase.remind_after_s *= 2
                self._write("message", f"still {phase.progress(now)}")


class LiveDisplay:
    """A display at the bottom of a terminal: the last steps, a bar and the running phases; other lines scroll above.

    Attributes:
        rows: Newest steps, as cells by column.
        bar: The bar of steps; None without one.
    """

    def __init__(self, console: Console, phases: Sequence[Phase], *, clock: Callable[[], float]) -> None:
        """Create the display of a console and of the running phases, without drawing."""
        self._console = console
        self._phases = phases
        self._clock = clock
        self._live: Live | None = None
        self.bar: RenderableType | None = None
        self.rows: deque[Mapping[str, str]] = deque(maxlen=MAX_ROWS)
        self._spinner = Spinner("dots")
        self._drawn = 0, Group()
        self._drawn_s = 0.0

    def show(self, *, bar: RenderableType | None = None) -> None:
        """Draw the phases, the steps and the bar, or a new bar."""
        self.bar = bar or self.bar
        if self.bar is None and not self._phases:
            self.stop(is_kept=False)
        elif self._live is None:
            self._live = Live(get_renderable=self._rendered, console=self._console, auto_refresh=False)
            self._live.start()
            self.tick()
        elif self._clock() - self._drawn_s >= MIN_DRAW_S:
            self.tick()  # else the next tick shows it, because a step may be as fast as a redraw

    def tick(self) -> None:
        """Redraw."""
        if self._live is not None:
            self._drawn_s = self._clock()
            self.erase_wrapped()
            self._live.refresh()

    def end_bar(self) -> None:
        """Leave steps and bar on the screen. Idempotent."""
        if self.bar is not None:
            self.stop(is_kept=True)
            self.bar = None
            self.rows.clear()
            self.show()

    def stop(self, *, is_kept: bool) -> None:
        """Restore the terminal, and erase the display unless it is kept. Idempotent."""
        if self._live is None:
            return
        self.erase_wrapped()
        live, self._live = self._live, None
        live.transient = not is_kept
        live.stop()
        self._drawn = 0, Group()
        if isinstance(self._console.file, OutputThread):
            self._console.file.drain(SETTLE_S)  # otherwise others write before the display is erased

    def erase_wrapped(self) -> None:
        """Erase the extra rows of a display wrapped by a narrowed terminal, which rich does not count."""
        before, drawn = self._drawn
        width = self._console.width
        if width < before:
            lines = self._console.render_lines(drawn, self._console.options.update(width=before), pad=False)
            extra = sum(max(Segment.get_line_length(line) - 1, 0) // width for line in lines)
            up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * extra
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up))
            self._drawn = width, drawn

    def _rendered(self) -> RenderableType:
        parts: list[RenderableType] = [self._table()] if self.rows else []
        parts += [] if self.bar is None else [self.bar]
        if self._live is not None:
            now = self._clock()
            frame = f"{self._spinner.render(now)} "
            phases = [frame + phase.progress(now) for phase in tuple(self._phases)]
            # An empty line keeps the display's height between the parts of a step.
            parts += [Text(phase, overflow="ellipsis", no_wrap=True) for phase in phases or [" "]]
        self._drawn = self._console.width, Group(*parts)
        return self._drawn[1]

    def _table(self) -> Table:
        """Return the last steps, with as many columns as fit, most important first."""
        rows = list(self.rows)[-max(1, self._console.height - OTHER_LINES) :]
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


def _bar(title: str, step: int, total_steps: int, *, rate: str = "", eta: str = "") -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(ratio=1)
    cells: list[RenderableType] = [Text(title), ProgressBar(total=max(total_steps, 1), completed=step)]
    for text, style in ((f"{step}/{total_steps}", "bold"), (rate, "cyan"), (eta, "yellow")):
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
    judged = sorted(((_judge(sample), sample) for sample in samples), key=operator.itemgetter(0))
    right = [(verdict, sample) for (*_, verdict), sample in judged if verdict == "right"]
    others = [(verdict, sample) for (*_, verdict), sample in judged if verdict != "right"]
    heading = f"{title}: {len(samples)} samples"
    heading += f", {len(others)} wrong" if all(verdict in VERDICT_STYLES for verdict, _ in others) else ", worst first"
    if (len(others) > MAX_WRONG or len(right) > MAX_RIGHT) and file is not None:
        heading += f"; all are in {file}"
    return [Text(heading), *(_sample_line(*one) for one in (*others[:MAX_WRONG], *right[:MAX_RIGHT]))]


def _sample_line(verdict: str, sample: GenerationSample) -> Text:
    text = f" {plain_text(sample.input, limit=MAX_TEXT)} -> {plain_text(sample.output, limit=MAX_TEXT)}"
    if (truth := json_text(sample.ground_truth)) is not None:
        text += f"  expected {plain_text(truth, limit=MAX_TEXT)}"
    if sample.failure is not None:
        text += f"  {plain_text(sample.failure, limit=MAX_FAILURE)}"
    return Text.assemble("  ", (f"{verdict}:", VERDICT_STYLES.get(verdict, "yellow")), text)


def _judge(sample: GenerationSample) -> tuple[bool, float, str]:
    """Return a sort key, failed sessions first, then by score, and a verdict.

    The verdict is right or wrong if that is clear, else the score, whose scale is unknown here.
    """
    values = {"reward": sample.score, **sample.components}
    value = next(values[name] for name in MAIN_VARIABLES if name in values)
    verdict = "right" if value == 1 else f"score {value:.3g}"
    if sample.failure is not None or value <= 0:
        verdict = "wrong" if sample.failure is None else "failed"
    return sample.failure is None, -math.inf if math.isnan(value) else value, verdict


class RunConsole(Console):
    """A rich console that becomes silent, instead of ending the program, if its reader is gone."""

    def on_broken_pipe(self) -> None:
        """Stop all output, also of the underlying file; rich would raise SystemExit."""
        self.quiet = True
        with suppress(io.UnsupportedOperation, ValueError), Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), self.file.fileno())


class OutputThread(io.TextIOBase):
    """A text stream whose writes are made by its own thread, in order.

    So a paused terminal (Ctrl-S) or a pipe that nobody reads never blocks a run. The next write raises an error of the
    thread, once. A killed process loses writes that are still queued.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int, *, encoding: str = "utf-8", errors: str | None = None) -> None:
        """Start the thread.

        Args:
            descriptor: Descriptor of an open file, pipe or terminal; never closed.
            encoding: Encoding of the text.
            errors: Handling of characters that the encoding lacks, as in `str.encode`; None raises.
        """
        self._descriptor = descriptor
        self.encoding = encoding
        self._errors = errors or "strict"
        self._writes: queue.Queue[bytes] = queue.Queue(MAX_QUEUED)
        self._error: OSError | None = None
        threading.Thread(target=self._work, name="console-output", daemon=True).start()
        atexit.register(self.drain)

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
        content = text.encode(self.encoding, self._errors)
        error, self._error = self._error, None
        if error is not None:
            raise error
        with suppress(queue.Full):
            self._writes.put_nowait(content)
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


def _standard_output(kind: ConsoleKind) -> Console:
    """Return standard output through a thread, or as it is without a descriptor, as in a notebook or a test."""
    file: OutputThread | None = None
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            file = OutputThread(sys.stdout.fileno(), encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    is_forced = None if kind == "auto" else kind == "bar"
    target = RunConsole(file=cast("IO[str] | None", file), force_terminal=is_forced, force_interactive=is_forced)
    if kind == "auto" and not target.file.isatty():  # FORCE_COLOR does not turn a file into a terminal
        target.is_interactive = False
    return target


def plain_text(text: str, *, limit: int) -> str:
    r"""Return the text as one line, with invisible characters escaped (`\n`, `\x1b`, `\u202e`) and a long middle cut.

    Args:
        text: Any text.
        limit: Maximum length of the result; at least the length of the gap that replaces the middle.
    """
    if len(text) > limit:  # before escaping, because a response may be long
        text = text[:limit] + text[-limit:]
    text = escaped(text)
    if len(text) <= limit:
        return text
    room = limit - len(GAP)
    return text[: room - room // 2] + GAP + text[len(text) - room // 2 :]


def duration_text(seconds: float) -> str:
    """Return a duration such as `42 s`, `3:05` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
