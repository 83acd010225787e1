"""A diagnosis as text, for a terminal or a file."""

from rich.console import Console
from rich.text import Text

from rl_metrics.doctor.diagnosis import Ailment, Cause, Diagnosis
from rl_metrics.trackers.text import plain_text

MOST_CHARACTERS = 2_000
"""Of a line."""


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Write what is wrong, the first cause on top, then what was looked at and is not."""
    _line(console, f"run {diagnosis.run}", style="bold")
    first = diagnosis.first_cause
    if first is not None:
        _line(console, f"first cause: {first.title}", style="bold red")
    elif not diagnosis.ailments and all(reading.state == "unknown" for reading in diagnosis.readings):
        _line(console, "nothing could be looked at", style="bold yellow")
    elif not diagnosis.ailments:
        _line(console, "nothing found", style="bold green")
    for ailment in diagnosis.ailments:
        _show_ailment(ailment, console)
    for number, reading in enumerate(diagnosis.readings):
        if not number:
            _line(console, "")
        mark, style = ("ok", "green") if reading.state == "right" else ("unknown", "yellow")
        _line(console, f"{reading.kind}: {mark}: {reading.text}", style=style)


def _show_ailment(ailment: Ailment, console: Console) -> None:
    _line(console, "")
    _line(console, f"{ailment.kind}: {ailment.what}", style="bold")
    evidence = list(dict.fromkeys(evidence.text for evidence in ailment.evidence))
    for text in evidence:
        _line(console, f"  {text}")
    said = set(evidence)
    for number, cause in enumerate(ailment.causes, start=1):
        _show_cause(number, cause, console, said)
    if ailment.against:
        _line(console, "  what speaks against other causes:", style="dim")
    for name, text in ailment.against:
        _line(console, f"    {name}: {text}", style="dim")
    for line in ailment.details:
        _line(console, f"  | {line}", style="dim")


def _show_cause(number: int, cause: Cause, console: Console, said: set[str]) -> None:
    """The cause, without the lines that the ailment has said; its own are added to them."""
    share = "" if cause.share is None else f" ({100.0 * cause.share:.0f} %)"
    _line(console, f"  {number}. {cause.title}{share}", style="bold")
    evidence = [f"     because {evidence.text}" for evidence in cause.evidence if evidence.text not in said]
    advice = [f"     try: {advice}" for advice in cause.advice if advice not in said]
    for line in dict.fromkeys(evidence):
        _line(console, line)
    for line in dict.fromkeys(advice):
        _line(console, line, style="cyan")
    said.update(cause.advice, (evidence.text for evidence in cause.evidence))


def _line(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(plain_text(text, limit=MOST_CHARACTERS), style=style), soft_wrap=True)
