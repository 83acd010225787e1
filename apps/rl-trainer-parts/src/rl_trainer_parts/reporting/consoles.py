"""The console of a run."""

from rl_metrics.trackers import ConsoleTracker
from rl_trainer_parts.settings.schema import Settings


def make_console(settings: Settings) -> ConsoleTracker:
    """The console that `metrics.console` selects; by default a live display in a terminal, plain lines elsewhere."""
    return ConsoleTracker(
        kind=settings.metrics.console,
        hidden=settings.zero_metrics,
        generations_in="generations.jsonl and the report" if settings.metrics.report else "generations.jsonl",
    )
