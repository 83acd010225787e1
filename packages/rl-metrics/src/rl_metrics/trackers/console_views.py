"""Two ways to show a run: a live display in a terminal, and plain lines everywhere else."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import UnsupportedOperation

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

Row = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a view shows of one step.

    Attributes:
        title: What is running, such as "GRPO".
        step: Steps done.
        total_steps: Steps to do.
        readings: (label, value) pairs such as ("reward", "0.912").
        eta: Time left, such as "1:05"; "" while unknown.
        validation: Validation of this step, such as "0.968"; None without one.
        is_due: True for a step that is always shown: the first, the last, and those with a validation.
    """

    title: str
    step: int
    total_steps: int
    readings: tuple[Row, ...]
    eta: str
    validation: str | None
    is_due: bool


class RunConsole(Console):
    """A rich console that goes silent, instead of ending the program, when its reader is gone."""

    def on_broken_pipe(self) -> None:
        """Write nothing more, here or to the file behind (rich's own way is SystemExit)."""
        self.quiet = True
        try:
            target = self.file.fileno()
        except (UnsupportedOperation, ValueError):
            return
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, target)
        os.close(devnull)


class PlainView:
    """Plain lines: a line for a step at most every `min_interval_s`, always one for a step that is due."""

    def __init__(
        self, console: Console, *, min_interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write to a console.

        Args:
            console: Where to.
            min_interval_s: Least seconds between the lines of two steps that are not due.
            clock: Seconds.
        """
        self._console = console
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._last_line_s: float | None = None
        self._pending: StepReport | None = None

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def phase_began(self, text: str) -> None:
        """`starting vLLM ...`."""
        self.say(f"{text} ...")

    def phase_ended(self, text: str, outcome: str) -> None:
        """`starting vLLM: 7.8 s`, with the outcome "7.8 s"."""
        self.say(f"{text}: {outcome}")

    def progress_began(self, title: str, total_steps: int, done_steps: int) -> None:
        """`GRPO: 20 steps`, and from where when resumed."""
        self.progress_ended()
        self.say(f"{title}: {total_steps} steps" + (f", {done_steps} done before" if done_steps else ""))

    def stepped(self, report: StepReport) -> None:
        """A line, unless the last one is too recent."""
        now = self._clock()
        if report.is_due or self._last_line_s is None or now - self._last_line_s >= self._min_interval_s:
            self._line(report)
            self._last_line_s = now
        else:
            self._pending = report

    def progress_ended(self) -> None:
        """Show the last step when its line was held back. Can be called twice."""
        if self._pending is not None:
            self._line(self._pending)
        self._last_line_s = None

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Aligned `name  value` lines."""
        self.say(title)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.say(f"  {name.ljust(width)}  {value}")

    def close(self) -> None:
        """Show what was held back."""
        self.progress_ended()

    def _line(self, report: StepReport) -> None:
        self._pending = None
        readings = "".join(f"  {label} {value}" for label, value in report.readings)
        eta = f"  eta {report.eta}" if report.eta else ""
        self.say(f"{report.title} {report.step}/{report.total_steps}{readings}{eta}")


class LiveView:
    """A progress bar, the readings and the running phase at the bottom of a terminal; what stays scrolls above."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Draw on a console that is a terminal."""
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._report: StepReport | None = None
        self._phases: list[tuple[str, float, Spinner]] = []

    def say(self, text: str) -> None:
        """A line above the display."""
        self._console.print(text, markup=False, highlight=False, emoji=False)

    def phase_began(self, text: str) -> None:
        """A spinner with the time that it has taken."""
        self._phases.append((text, self._clock(), Spinner("dots")))
        self._show()

    def phase_ended(self, text: str, outcome: str) -> None:
        """A line for it, unless steps are running."""
        self._phases = [phase for phase in self._phases if phase[0] != text]
        if self._progress is None:
            self.say(f"{text}: {outcome}")
        self._show()

    def progress_began(self, title: str, total_steps: int, done_steps: int) -> None:
        """A new bar."""
        self.progress_ended()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
            expand=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task(title, total=total_steps, completed=done_steps, eta="")
        self._show()

    def stepped(self, report: StepReport) -> None:
        """Move the bar; a validation also gets a line that stays."""
        self._report = report
        if report.validation is not None:
            self.say(f"{report.title} {report.step}/{report.total_steps}  validation {report.validation}")
        if self._progress is not None:
            eta = f"eta {report.eta}" if report.eta else ""
            self._progress.update(self._task, completed=report.step, eta=eta)
        self._show()

    def progress_ended(self) -> None:
        """Leave the bar and the last readings where they are. Can be called twice."""
        if self._progress is None:
            return
        self._stop()
        self._progress = None
        self._report = None
        self._show()

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """A table; long values fold."""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        self._console.print(table)

    def close(self) -> None:
        """Give the terminal back. Can be called twice."""
        self._phases = []
        self._stop()
        self._progress = None

    def _show(self) -> None:
        if self._progress is None and not self._phases:
            self._stop()
            return
        if self._live is None:
            self._live = Live(get_renderable=self._rendered, console=self._console, refresh_per_second=4)
            self._live.start()
        self._live.refresh()

    def _stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.transient = self._progress is None
            live.stop()

    def _rendered(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._progress is not None:
            parts.append(self._progress.get_renderable())
        if self._report is not None and self._report.readings:
            readings = "  ".join(f"{label} {value}" for label, value in self._report.readings)
            parts.append(Text(f"  {readings}", style="dim", overflow="ellipsis", no_wrap=True))
        for text, began_s, spinner in self._phases:
            spinner.update(text=Text(f"{text} ... {self._clock() - began_s:.0f} s"))
            parts.append(spinner)
        return Group(*parts)


View = PlainView | LiveView
"""How a ConsoleTracker draws."""
