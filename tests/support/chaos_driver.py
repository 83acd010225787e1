"""`python -m chaos_driver train SETTINGS.toml ...`: the synchronous trainer, which records the start of each phase.

It appends a line to the file `CHAOS_PHASES`; a phase lasts until the next line.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "CHAOS_PHASES"
PHASES = ("start-up", "training", "validation", "checkpoint")


def note(phase: str) -> None:
    """Record the start of a phase."""
    descriptor = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{phase}\n".encode())
    os.close(descriptor)


def noted(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, with its calls recorded as a phase."""

    def call(*arguments: Any, **options: Any) -> Any:
        note(phase)
        return function(*arguments, **options)

    return call


if __name__ == "__main__":
    note("start-up")
    from rl_sync_trainer import loop, main, training_run

    loop.train_step = noted("training", loop.train_step)
    loop.evaluate = noted("validation", loop.evaluate)
    training_run.TrainingRun._save = noted("checkpoint", training_run.TrainingRun._save)  # type: ignore[method-assign]
    sys.exit(main.main())
