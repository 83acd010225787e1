"""Live display at the bottom of a terminal: the last steps, a bar, the machine's load, and running phases."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment, Segments
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rl_metrics.trackers.console_resources import ResourceWatch
from rl_metrics.trackers.console_views import Phase, Row, StepReport
from rl_metrics.trackers.output_thread import OutputThread

MAX_ROWS = 6
"""Maximum number of steps in the table."""

OTHER_LINES = 8
"""Terminal lines reserved for the rest of the display and for scrolling text above it."""

MIN_DRAW_S = 0.25
"""Minimum seconds between redraws, except those of ticks."""

SETTLE_S = 0.5
"""Maximum wait for the terminal before others write to it, in seconds."""

FIRST = ("step", "reward", "validation")
"""First columns of the table, in order."""

STYLES = {
    "step": "bold",
    "reward": "cyan",
    "loss": "cyan",
    "validation": "bold green",
    "speed": "dim",
    "step time": "dim",
}


class LiveView:
    """The live display; permanent lines scroll above it."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a display on a console that is a terminal."""
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._title: tuple[str, int, int] | None = None
        self._newest: StepReport | None = None
        self._rows: deque[dict[str, str]] = deque(maxlen=MAX_ROWS)
        self._validation = ""
        self._phases: list[Phase] = []
        self._spinner = Spinner("dots")
        self._resources = ResourceWatch()
        self._drawn: tuple[int, list[int]] = (0, [])
        self._drawn_s = 0.0

    def say(self, text: Text) -> None:
        """Write lines above the display."""
        self._erase_wrapped()
        self._console.print(text, markup=False, highlight=False, emoji=False)

    def phase_began(self, phase: Phase) -> None:
        """Show a spinner with the elapsed time."""
        self._phases.append(phase)
        self._show()

    def phase_ended(self, phase: Phase, outcome: str) -> None:
        """Write a line for the phase, unless it was part of a step."""
        self._phases = [one for one in self._phases if one is not phase]
        if not phase.is_brief and self._title is None:
            self.say(Text.assemble(phase.text, (f": {outcome}", "dim")))
        self._show()

    def progress_began(self, title: str, total_steps: int, done_steps: int) -> None:
        """Start a new bar."""
        self.progress_ended()
        self._title = title, total_steps, done_steps
        self._show()

    def stepped(self, report: StepReport) -> None:
        """Move the bar; a validation also gets a permanent line."""
        self._newest = report
        self._rows.append(self._cells(report))
        self._title = report.title, report.total_steps, report.step
        if report.validation is not None:
            line = f"{report.title} {report.step}/{report.total_steps}  validation "
            self.say(Text.assemble(line, (report.validation, "bold green")))
        self._show()

    def progress_ended(self) -> None:
        """Leave table and bar on the screen. Idempotent."""
        if self._title is None:
            return
        self._stop(is_kept=True)
        self._title = None
        self._newest = None
        self._rows.clear()
        self._show()

    def table(self, title: str, rows: Mapping[str, Any], shown: Sequence[Row]) -> None:  # noqa: ARG002
        """Write a table, with long values wrapped."""
        table = Table(
            title=title, title_justify="left", title_style="bold green", show_header=False, box=None, padding=(0, 2)
        )
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in shown:
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
        self._resources.stop()
        self._phases = []
        self._stop(is_kept=self._title is not None)
        self._title = None

    def _show(self) -> None:
        if self._title is None and not self._phases:
            self._stop(is_kept=False)
            return
        if self._live is None:
            self._resources.start()
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
        if self._title is not None:
            if self._rows:
                parts.append(self._table())
            parts.append(self._bar(*self._title))
        now = self._clock()
        frame = f"{self._spinner.render(now)} "
        parts += [_line(frame + phase.progress(now), "") for phase in self._phases]
        if self._live is not None and not self._phases:
            parts.append(Text(" "))  # keeps the display's height between the parts of a step
        if self._live is not None and self._resources.text:
            parts.append(_line(self._resources.text, "dim"))
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

    def _bar(self, title: str, total_steps: int, step: int) -> RenderableType:
        newest = self._newest
        rate = "" if newest is None or newest.step_s is None else f"{newest.step_s:.3g} s/step"
        eta = f"eta {newest.eta}" if newest is not None and newest.eta else ""
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


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, overflow="ellipsis", no_wrap=True)
