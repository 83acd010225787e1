"""Whether a training is healthy, and why not."""

from rl_metrics.health.finding import Check, Evidence, Finding, Side, Status, Verdict

__all__ = ["Check", "Evidence", "Finding", "Side", "Status", "Verdict"]
