"""The `validate` command of both trainers: check everything that can be checked, then evaluate a policy."""

import asyncio
from collections.abc import Callable

from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.checks.engines import check_engines, check_loop
from rl_trainer_parts.rollouts.evaluation import validate_policy
from rl_trainer_parts.rollouts.inputs import read_inputs, what_to_look_at
from rl_trainer_parts.settings.schema import Settings


def validate(settings: Settings, say: Callable[[str], None]) -> dict[str, float]:
    """Evaluate the policy on the validation and test prompts and return its metrics.

    Args:
        settings: A run's settings.
        say: Prints warnings and hints.

    Raises:
        SettingsError: A setting is impossible.
        DataError: A user's file cannot be used.
    """
    check_settings(settings)
    inputs = read_inputs(settings)
    for note in what_to_look_at(settings, inputs):
        say(f"note: {note}")
    check_loop(settings, inputs.tokenizer)
    check_engines(settings)
    return asyncio.run(validate_policy(settings, inputs))
