"""What users see of a run."""

from rl_metrics.trackers import ConsoleTracker
from rl_trainer_parts.settings.schema import Settings


def make_console(settings: Settings) -> ConsoleTracker:
    """A live display in a terminal, plain lines elsewhere, or what `metrics.console` says."""
    return ConsoleTracker(
        kind=settings.metrics.console,
        hidden=settings.zero_metrics,
        generations_in="generations.jsonl and the report" if settings.metrics.report else "generations.jsonl",
        subject=f"{settings.policy.path} {settings.rollout.engine} {settings.policy.learner}",
    )
