"""Console output of a run: startup, steps and results."""

import io
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import methodcaller
from typing import IO, Any, Literal, cast

import structlog
from rich.console import Console
from rich.text import Text

from rl_core.terminal_text import escaped, escaped_lines
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.console_live import LiveView
from rl_metrics.trackers.console_samples import sample_lines
from rl_metrics.trackers.console_views import JsonView, Phase, PlainView, QuietView, Row, RunConsole, StepReport
from rl_metrics.trackers.output_thread import OutputThread, unhurried_stdout
from rl_metrics.trackers.usual_times import UsualTimes, phase_key
from rl_metrics.validation.summary import headline

log = structlog.get_logger(__name__)

View = PlainView | LiveView
"""Renderer of a ConsoleTracker; its texts are already free of control sequences."""

ConsoleKind = Literal["auto", "bar", "lines", "quiet", "json", "off"]
"""Kind of output, in order: "bar" in a terminal and else "lines"; live display; lines; findings and end; JSON; none."""

TICK_S = 0.5

WORTH_SAYING_S = 2.0
"""Minimum usual duration of a phase to announce it, in seconds."""


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
        subject: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a console without writing.

        Args:
            console: Destination; None opens standard output with `run_console`.
            kind: Kind of output.
            readings: Values to show of each step.
            hidden: Metrics that are 0 by design in this run. A live display hides them; lines, which people search by
                the main labels, have the main ones as 0.
            generations_in: File with all samples of a table, such as "generations.jsonl".
            subject: What the durations of phases depend on, such as the policy's path. They are stored in the user's
                cache folder and shown when the same phase runs again. None stores none.
            clock: Returns seconds.
        """
        target = console if console is not None else _target(kind)
        self._output = target.file if isinstance(target.file, OutputThread) else None
        self._view: View | None = _view(kind, target, clock=clock)
        self._readings = tuple(readings)
        self._hidden = frozenset(hidden)
        self._generations_in = generations_in
        self._usual = None if subject is None else UsualTimes(subject)
        self._clock = clock
        self._lock = threading.RLock()
        self._ticker: threading.Thread | None = None
        self._phases: list[Phase] = []
        self._is_closed = threading.Event()
        self._seen: set[str] = set()
        self._title = "training"
        self._total_steps = 0
        self._first_step = 0
        self._began_s = 0.0
        self._has_begun = False
        self._validation: float | None = None

    def say(self, text: str, *, style: str = "") -> None:
        """Write permanent lines.

        Args:
            text: Text to write.
            style: Style of rich, such as "yellow"; styled text is also shown with kind "quiet".
        """
        shown = Text(escaped_lines(text), style=style)
        self._draw(lambda view: view.say(shown))

    @contextmanager
    def phase(self, text: str, *, is_brief: bool = False, detail: Callable[[], str] = str) -> Iterator[None]:
        """Show that a slow phase runs, and its duration at the end, even if it fails or is interrupted.

        Args:
            text: Name of the phase, such as "starting vLLM".
            is_brief: Whether it is part of a step, and shown only while it runs.
            detail: Returns the progress, such as "3 of 8 groups ready"; called twice a second from another thread.
        """
        is_first = phase_key(text) not in self._seen
        self._seen.add(phase_key(text))
        usual_s = self._usual.of(text) if self._usual is not None and is_first else None
        phase = Phase(
            text=escaped(text),
            began_s=self._clock(),
            usual=f" (usually {duration_text(usual_s)})" if usual_s is not None and usual_s >= WORTH_SAYING_S else "",
            is_brief=is_brief,
            detail=lambda: escaped(detail()),
        )
        self._phases = [*self._phases, phase]
        self._draw(lambda view: view.phase_began(phase))
        self._start_ticker()
        outcome = "interrupted after "
        try:
            yield
            outcome = ""
        finally:
            took_s = self._clock() - phase.began_s
            self._phases = [one for one in self._phases if one is not phase]
            self._draw(lambda view: view.phase_ended(phase, f"{outcome}{took_s:.1f} s"))
            if self._usual is not None and is_first and not outcome:
                self._usual.note(text, took_s)

    def running(self) -> list[str]:
        """Return the running phases, such as `starting vLLM ... 12 s (usually 41 s)`."""
        return [phase.progress(self._clock()) for phase in self._phases]

    def begin(self, title: str, *, total_steps: int, done_steps: int = 0) -> None:
        """Start a bar of steps, and end the previous one.

        Args:
            title: Title, such as "warm start" or "GRPO".
            total_steps: Number of the last step.
            done_steps: Number of steps done before, in a resumed run.
        """
        self._title, self._total_steps = escaped(title), total_steps
        self._start(done_steps)
        self._draw(lambda view: view.progress_began(self._title, total_steps, done_steps))
        self._start_ticker()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step: its readings, its validation if any, and the time left."""
        validation = headline(metrics)
        if validation is not None:
            self._validation = validation
        if not self._has_begun:
            self._start(step - 1)
        done = step - self._first_step
        step_s = (self._clock() - self._began_s) / done if done > 0 else None
        left = self._total_steps - step
        report = StepReport(
            title=self._title,
            step=step,
            total_steps=max(self._total_steps, step),
            readings=self._shown(metrics),
            more=tuple(self._read(metrics, is_extra=True)),
            metrics=metrics,
            step_s=step_s,
            eta="" if step_s is None or left <= 0 else duration_text(step_s * left),
            validation=None if validation is None else f"{validation:.3f}",
        )
        self._draw(lambda view: view.stepped(report))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished validation; other late metrics are not shown."""
        found = headline(metrics)
        if found is not None:
            self._validation = found
            self.say(f"validation of step {step}: {found:.3f}")

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Show a few samples of a name's first and last table, wrong ones first, and the file with all of them.

        Without `begin`, each table may be the last, so all are shown.
        """
        is_first = name not in self._seen and not self._first_step
        self._seen.add(name)
        if not is_first and step < self._total_steps:
            return
        title = escaped(f"{name.removesuffix('/generations')} at step {step}")
        for line in sample_lines(title, samples, place=self._generations_in):
            self._draw(methodcaller("say", line))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Show nothing, because a distribution does not fit a line of text."""

    def end(self) -> None:
        """End the bar of steps. Idempotent."""
        self._has_begun = False
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
        shown = [(escaped(name), escaped(text)) for name, text in texts.items()]
        self._draw(lambda view: view.table(escaped(title), rows, shown))

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        self._is_closed.set()
        self._draw(lambda view: view.close())
        if self._output is not None:
            self._output.drain()

    def _start(self, done_steps: int) -> None:
        self._first_step = done_steps
        self._began_s = self._clock()
        self._has_begun = True

    def _shown(self, metrics: Mapping[str, float]) -> tuple[Row, ...]:
        shown = list(self._read(metrics, is_extra=False))
        if self._validation is not None:
            shown.append(("validation", f"{self._validation:.3f}"))
        return tuple(shown)

    def _read(self, metrics: Mapping[str, float], *, is_extra: bool) -> Iterator[Row]:
        for reading in self._readings:
            if reading.is_extra != is_extra:
                continue
            known = [name for name in reading.names if name in metrics]
            names = [name for name in known if name not in self._hidden]
            is_line = not is_extra and not isinstance(self._view, LiveView)
            if names or (known and is_line):
                value = metrics[names[0]] if names else 0.0
                yield reading.label, f"{value:{reading.format}}{reading.unit}"

    def _start_ticker(self) -> None:
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="console", daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        while not self._is_closed.wait(TICK_S):
            self._draw(lambda view: view.tick())

    def _draw(self, draw: Callable[[View], None]) -> None:
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


def run_console(**options: Any) -> RunConsole:
    """Return a console on standard output that never waits for its reader.

    Args:
        options: Options of rich's Console.
    """
    return RunConsole(file=cast("IO[str] | None", unhurried_stdout()), **options)


def _target(kind: ConsoleKind) -> Console:
    if kind == "off":
        return Console(file=io.StringIO(), quiet=True)
    if kind == "bar":
        return run_console(force_terminal=True, force_interactive=True)
    if kind != "auto":
        return run_console(force_terminal=False, force_interactive=False)
    target = run_console()
    if not target.file.isatty():  # FORCE_COLOR does not turn a file into a terminal
        target.is_interactive = False
    return target


def _view(kind: ConsoleKind, target: Console, *, clock: Callable[[], float]) -> View:
    if kind == "json":
        return JsonView(target)
    if kind == "quiet":
        return QuietView(target)
    if target.is_interactive and not target.options.ascii_only:
        return LiveView(target, clock=clock)
    return PlainView(target, clock=clock)


def duration_text(seconds: float) -> str:
    """Return a duration such as `42 s`, `3:05` or `1:02:03`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
