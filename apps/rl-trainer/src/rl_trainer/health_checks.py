"""What can be refused of the settings of health."""

import math
from collections.abc import Callable, Iterator

from rl_core.errors import SettingsError
from rl_metrics.health import GUIDE, require_rules, with_thresholds, without
from rl_metrics.health.finding import Severity
from rl_trainer.settings import Settings

LEVELS: tuple[Severity, ...] = ("critical", "warning")
"""Words that `health.pause_on` takes beside names of rules."""


def health_problems(settings: Settings) -> Iterator[str]:
    """Problems of `[health]`: names that there are not, and rules that cannot pause as they are off."""
    health = settings.health
    for name, number in health.thresholds.items():
        if math.isnan(number):
            yield f"health.thresholds: {name} must be a number; found {number}."
    look_ups: dict[str, Callable[[], object]] = {
        "health.thresholds": lambda: with_thresholds(GUIDE, health.thresholds),
        "health.off": lambda: without(GUIDE, health.off),
        "health.pause_on": lambda: require_rules(GUIDE, health.pause_on, also=LEVELS),
    }
    for setting, look_up in look_ups.items():
        try:
            look_up()
        except SettingsError as error:
            yield f"{setting}: {error}"
    for rule in health.pause_on:
        if rule in health.off:
            yield f"health.pause_on has {rule}, which health.off switches off; take it out of one of them."
    if health.pause_on and not health.enabled:
        yield "health.pause_on needs health.enabled = true."
