"""The console that the settings ask for."""

import io

from rich.console import Console

from rl_metrics.trackers.console import ConsoleTracker, run_console
from rl_trainer.settings import Settings


def make_console(settings: Settings) -> ConsoleTracker:
    """A progress bar in a terminal, plain lines elsewhere, or what `metrics.console` says."""
    kind = settings.metrics.console
    generations_in = "generations.jsonl and the report" if settings.metrics.report else "generations.jsonl"
    if kind == "off":
        return ConsoleTracker(console=Console(file=io.StringIO()))
    if kind == "auto":
        return ConsoleTracker(generations_in=generations_in)
    target = run_console(force_terminal=kind == "bar", force_interactive=kind == "bar")
    return ConsoleTracker(console=target, generations_in=generations_in)
