"""Contents of a console, and its views as lines: plain, quiet and JSON."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import UnsupportedOperation
from typing import Any

from rich.console import Console
from rich.text import Text

from rl_core.data import encodable_json
from rl_metrics.run_files.json_lines import as_plain

Row = tuple[str, str]

REMIND_AFTER_S = 30.0
"""Seconds after which a running phase gets a reminder; repeated whenever its duration doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Contents of a view for one step.

    Attributes:
        title: Title of the running part, such as "GRPO".
        step: Number of finished steps.
        total_steps: Number of steps in total.
        readings: (label, value) pairs such as ("reward", "0.912"); the most important ones.
        more: Further pairs, which the live display shows if there is room.
        metrics: All metrics of the step.
        step_s: Mean seconds of a step so far; None if unknown.
        eta: Time left, such as "1:05"; "" if unknown.
        validation: Validation of this step, such as "0.968"; None without one.
    """

    title: str
    step: int
    total_steps: int
    readings: tuple[Row, ...]
    more: tuple[Row, ...]
    metrics: Mapping[str, float]
    step_s: float | None
    eta: str
    validation: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Phase:
    """A slow phase.

    Attributes:
        text: Name of the phase, such as "starting vLLM".
        began_s: Start time by the console's clock, in seconds.
        usual: Usual duration, such as " (usually 41 s)"; "" if unknown.
        is_brief: Whether it is part of a step, which gets no lines of its own unless it takes long.
        detail: Returns the progress; "" if unknown.
    """

    text: str
    began_s: float
    usual: str
    is_brief: bool
    detail: Callable[[], str]

    def progress(self, now_s: float) -> str:
        """Return the progress, such as `starting vLLM ... 12 s (usually 41 s)`."""
        detail = self.detail()
        return f"{self.text} ... {now_s - self.began_s:.0f} s{self.usual}" + (f", {detail}" if detail else "")


class RunConsole(Console):
    """A rich console that becomes silent, instead of ending the program, if its reader is gone."""

    def on_broken_pipe(self) -> None:
        """Stop all output, also of the underlying file; rich would raise SystemExit."""
        self.quiet = True
        try:
            target = self.file.fileno()
        except (UnsupportedOperation, ValueError):
            return
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, target)
        os.close(devnull)


class PlainView:
    """Plain lines: one per step, with all its readings, so that `grep` and `awk` find every step."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a view of a console.

        Args:
            console: Destination.
            clock: Returns seconds.
        """
        self._console = console
        self._clock = clock
        self._reminders: dict[Phase, float] = {}

    def say(self, text: Text) -> None:
        """Write a line."""
        self._print(text)

    def phase_began(self, phase: Phase) -> None:
        """Write a line such as `starting vLLM ... (usually 41 s)`."""
        self._reminders[phase] = REMIND_AFTER_S
        if not phase.is_brief:
            self._print(f"{phase.text} ...{phase.usual}")

    def phase_ended(self, phase: Phase, outcome: str) -> None:
        """Write a line such as `starting vLLM: 7.8 s`, with the outcome "7.8 s"."""
        self._reminders.pop(phase, None)
        if not phase.is_brief:
            self._print(f"{phase.text}: {outcome}")

    def progress_began(self, title: str, total_steps: int, done_steps: int) -> None:
        """Write a line such as `GRPO: 20 steps`, with the steps done before if resumed."""
        self._print(f"{title}: {total_steps} steps" + (f", {done_steps} done before" if done_steps else ""))

    def stepped(self, report: StepReport) -> None:
        """Write a line."""
        readings = "".join(f"  {label} {value}" for label, value in (*report.readings, *report.more))
        eta = f"  eta {report.eta}" if report.eta else ""
        self._print(f"{report.title} {report.step}/{report.total_steps}{readings}{eta}")

    def progress_ended(self) -> None:
        """Write nothing."""

    def table(self, title: str, rows: Mapping[str, Any], shown: Sequence[Row]) -> None:  # noqa: ARG002
        """Write aligned `name  value` lines."""
        self._print(title)
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            self._print(f"  {name.ljust(width)}  {value}")

    def tick(self) -> None:
        """Write a reminder for each phase that takes long."""
        now = self._clock()
        for phase, after_s in self._reminders.items():
            if now - phase.began_s >= after_s:
                self._reminders[phase] = 2 * after_s
                self._print(f"still {phase.progress(now)}")

    def close(self) -> None:
        """Write nothing."""

    def _print(self, text: Text | str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class QuietView(PlainView):
    """Plain lines of problems and results only."""

    def say(self, text: Text) -> None:
        """Write a line for text with a style."""
        if text.style:
            self._print(text)

    def phase_began(self, phase: Phase) -> None:
        """Write nothing."""

    def phase_ended(self, phase: Phase, outcome: str) -> None:
        """Write nothing."""

    def progress_began(self, title: str, total_steps: int, done_steps: int) -> None:
        """Write nothing."""

    def stepped(self, report: StepReport) -> None:
        """Write nothing."""


class JsonView(PlainView):
    """One JSON object per line, for programs; each has `event` and `time`."""

    def say(self, text: Text) -> None:
        """Write `message`."""
        self._write("message", text=text.plain)

    def phase_began(self, phase: Phase) -> None:
        """Write `phase_began`, except for parts of steps, whose times are metrics."""
        if not phase.is_brief:
            self._write("phase_began", phase=phase.text)

    def phase_ended(self, phase: Phase, outcome: str) -> None:
        """Write `phase_ended`, except for parts of steps."""
        if not phase.is_brief:
            self._write("phase_ended", phase=phase.text, outcome=outcome)

    def progress_began(self, title: str, total_steps: int, done_steps: int) -> None:
        """Write `began`."""
        self._write("began", title=title, total_steps=total_steps, done_steps=done_steps)

    def stepped(self, report: StepReport) -> None:
        """Write `step` with all metrics."""
        self._write("step", step=report.step, total_steps=report.total_steps, metrics=report.metrics)

    def table(self, title: str, rows: Mapping[str, Any], shown: Sequence[Row]) -> None:  # noqa: ARG002
        """Write `summary`."""
        self._write("summary", title=title, rows=rows)

    def _write(self, event: str, **fields: Any) -> None:
        content = as_plain({"event": event, "time": time.time(), **fields})
        self._print(json.dumps(encodable_json(content)).replace("\x7f", "\\u007f"))
