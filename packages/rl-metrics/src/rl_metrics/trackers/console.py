"""The console: what is starting, how the steps go, and what came out."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

import structlog
from rich.console import Console

from rl_core.terminal_text import escaped, escaped_lines
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.console_views import LiveView, PlainView, Row, RunConsole, StepReport, View
from rl_metrics.trackers.output_thread import OutputThread, unhurried_stdout
from rl_metrics.trackers.text import plain_text
from rl_metrics.validation.summary import headline

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A number that the console shows of each step.

    Attributes:
        label: Such as "kl".
        names: Metrics; the first that the step has is shown.
        format: A format specification, such as ".3f".
        unit: Shown behind the value.
    """

    label: str
    names: tuple[str, ...]
    format: str = ".3f"
    unit: str = ""


READINGS = (
    Reading(label="loss", names=("sft/loss",), format=".4f"),
    Reading(label="reward", names=("critic/rewards/mean", "critic/score/mean")),
    Reading(label="kl", names=("actor/kl_loss", "actor/ppo_kl", "rollout_corr/kl"), format=".2g"),
    Reading(label="entropy", names=("actor/entropy",)),
    Reading(label="speed", names=("perf/throughput", "sft/throughput"), format=",.0f", unit=" tok/s"),
)
"""What the console shows unless told otherwise, beside the newest validation."""


MAX_SAMPLES = 3
"""Generations of a table that the console shows, a line each: the run's own lines shall not drown in them."""

MAX_TEXT, MAX_FAILURE = 60, 120
"""Characters of a text, and of the reason of a failure, that the console shows."""


class ConsoleTracker:
    """Shows a run: a live display in a terminal, plain lines otherwise.

    Nothing that it does can stop a run: when the terminal is gone or cannot show something, it warns once and
    is silent from then on. Nor can it hold a run up: the standard output is written by a thread, and what a terminal
    does not take is dropped.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        min_interval_s: float = 10.0,
        readings: Sequence[Reading] = READINGS,
        generations_in: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a console; nothing is written yet.

        Args:
            console: Where to write; None is the standard output, as `run_console` opens it.
            min_interval_s: Outside a terminal, least seconds between the lines of two steps.
            readings: What to show of a step.
            generations_in: Where people find all samples of a table, such as "generations.jsonl".
            clock: Seconds.
        """
        target = console if console is not None else run_console()
        self._output = target.file if isinstance(target.file, OutputThread) else None
        self._view: View | None
        if target.is_interactive:
            self._view = LiveView(target, clock=clock)
        else:
            self._view = PlainView(target, min_interval_s=min_interval_s, clock=clock)
        self._readings = tuple(readings)
        self._generations_in = generations_in
        self._clock = clock
        self._title = "training"
        self._total_steps = 0
        self._first_step = 0
        self._began_s = 0.0
        self._has_begun = False
        self._validation: float | None = None

    def say(self, text: str) -> None:
        """Write a line that stays."""
        shown = escaped_lines(text)
        self._draw(lambda view: view.say(shown))

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show that something slow runs, at once, and how long it took, also when it fails or is stopped.

        Args:
            text: What runs, such as "starting vLLM".
        """
        shown = escaped(text)
        self._draw(lambda view: view.phase_began(shown))
        began_s = self._clock()
        outcome = "broken off after "
        try:
            yield
            outcome = ""
        finally:
            took = f"{outcome}{self._clock() - began_s:.1f} s"
            self._draw(lambda view: view.phase_ended(shown, took))

    def begin(self, title: str, *, total_steps: int, done_steps: int = 0) -> None:
        """Start a bar of steps; the bar before it ends.

        Args:
            title: Such as "warm start" or "GRPO".
            total_steps: Number of the last step.
            done_steps: Steps done before, in a resumed run.
        """
        self._title, self._total_steps = escaped(title), total_steps
        self._start(done_steps)
        self._draw(lambda view: view.progress_began(self._title, total_steps, done_steps))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step: its readings, its validation if it had one, and the time left."""
        validation = headline(metrics)
        if validation is not None:
            self._validation = validation
        if not self._has_begun:
            self._start(step - 1)
        report = StepReport(
            title=self._title,
            step=step,
            total_steps=max(self._total_steps, step),
            readings=self._shown(metrics),
            eta=self._eta(step),
            validation=None if validation is None else f"{validation:.3f}",
            is_due=validation is not None or step == self._total_steps,
        )
        self._draw(lambda view: view.stepped(report))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a validation that is over; other late metrics are not shown."""
        found = headline(metrics)
        if found is not None:
            self._validation = found
            self._draw(lambda view: view.say(f"validation of step {step}: {found:.3f}"))

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Show the worst few in lines that stay, long texts cut in their middle, and say where all of them are."""
        count = f"{len(samples)} samples"
        if len(samples) > MAX_SAMPLES:
            place = "" if self._generations_in is None else f"; all are in {self._generations_in}"
            count = f"the worst {MAX_SAMPLES} of {count}{place}"
        self.say(f"{name} at step {step}: {count}")
        for sample in sorted(samples, key=_badness)[:MAX_SAMPLES]:
            self.say(_sample_line(sample))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Show nothing: a distribution is no line of text."""

    def end(self) -> None:
        """End the bar of steps. Can be called twice."""
        self._has_begun = False
        self._draw(lambda view: view.progress_ended())

    def summary(self, title: str, rows: Mapping[str, object]) -> None:
        """End the bar and show a table: what came out, and where everything lies.

        Args:
            title: Such as "run finished".
            rows: Value by name; a float is shown with four digits.
        """
        self.end()
        table = [
            (escaped(name), f"{value:.4g}" if isinstance(value, float) else escaped(str(value)))
            for name, value in rows.items()
        ]
        self._draw(lambda view: view.table(escaped(title), table))

    def close(self) -> None:
        """Give the terminal back. Can be called twice."""
        self._draw(lambda view: view.close())
        if self._output is not None:
            self._output.drain()

    def _start(self, done_steps: int) -> None:
        self._first_step = done_steps
        self._began_s = self._clock()
        self._has_begun = True

    def _shown(self, metrics: Mapping[str, float]) -> tuple[Row, ...]:
        shown: list[Row] = []
        for reading in self._readings:
            value = next((metrics[name] for name in reading.names if name in metrics), None)
            if value is not None:
                shown.append((reading.label, f"{value:{reading.format}}{reading.unit}"))
        if self._validation is not None:
            shown.append(("validation", f"{self._validation:.3f}"))
        return tuple(shown)

    def _eta(self, step: int) -> str:
        done, left = step - self._first_step, self._total_steps - step
        if done <= 0 or left <= 0:
            return ""
        return duration_text((self._clock() - self._began_s) / done * left)

    def _draw(self, draw: Callable[[View], None]) -> None:
        view = self._view
        if view is None:
            return
        try:
            draw(view)
        except Exception as error:
            self._view = None
            with suppress(Exception):
                view.close()
            log.warning("console_failed", error=f"{type(error).__name__}: {error}")


def run_console(**options: Any) -> RunConsole:
    """A console on the standard output that never waits for its reader.

    Args:
        options: Of rich's Console.
    """
    return RunConsole(file=cast("IO[str] | None", unhurried_stdout()), **options)


def _badness(sample: GenerationSample) -> tuple[bool, float]:
    """Sorts the worst first: failed sessions, then low scores."""
    return sample.failure is None, -math.inf if math.isnan(sample.score) else sample.score


def _sample_line(sample: GenerationSample) -> str:
    given, output = (plain_text(text, limit=MAX_TEXT) for text in (sample.input, sample.output))
    verdict = "failed" if sample.failure is not None else f"score {sample.score:.3g}"
    line = f"  {verdict}  {given} -> {output}"
    if sample.ground_truth is not None:
        line += f"  expected {plain_text(sample.ground_truth, limit=MAX_TEXT)}"
    return line if sample.failure is None else f"{line}  {plain_text(sample.failure, limit=MAX_FAILURE)}"


def duration_text(seconds: float) -> str:
    """`42 s`, `3:05` or `1:02:03`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
