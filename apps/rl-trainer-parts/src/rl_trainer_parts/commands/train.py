"""The command `train` of both trainers: check everything that can be checked, then run."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from rl_core.terminal_text import say
from rl_metrics.trackers import ConsoleTracker
from rl_trainer_parts.checks.algorithm import aggregation_notes
from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.checks.distillation import check_teachers
from rl_trainer_parts.checks.models import check_engines, check_images, check_loop, trainable_problems
from rl_trainer_parts.checks.unused import Unused, unused_settings
from rl_trainer_parts.machine.needs import machine_problems
from rl_trainer_parts.rollouts.inputs import input_notes, read_inputs, shows_images, with_kept_images
from rl_trainer_parts.run.folder import (
    RunFolder,
    choose_date,
    choose_products,
    open_run,
    require_format,
    require_free,
    require_resumable,
)
from rl_trainer_parts.settings.schema import SettingsT

Checked = tuple[SettingsT, Any, Sequence[str], Sequence[str]]
"""A run's settings, its inputs, further lines of its plan, and notes for the user."""


def check_rollouts(settings: SettingsT, problems: Iterable[str]) -> Checked[SettingsT]:
    """Check a run with rollouts, given problems that are known already, and read its prompts.

    Raises:
        SettingsError: A setting is impossible.
        DataError: A user's file cannot be used.
    """
    check_settings(settings, problems)
    inputs = read_inputs(settings)
    check_images(settings, inputs)
    check_teachers(settings, inputs.tokenizer, inputs.train)
    lines = check_loop(settings, inputs.tokenizer)
    check_engines(settings, has_images=shows_images(settings, inputs))
    return settings, inputs, lines, (*input_notes(settings, inputs), *aggregation_notes(settings))


def train_checked(
    settings: SettingsT,
    *,
    console: ConsoleTracker,
    resume: bool,
    dry_run: bool,
    describe: Callable[[SettingsT, Any, Sequence[str]], str],
    launch: Callable[[SettingsT, Any, RunFolder, ConsoleTracker], Coroutine[Any, Any, int]],
    check: Callable[[SettingsT, Iterable[str]], Checked[SettingsT]] = check_rollouts,
    also_refused: Iterable[str] = (),
    also_unused: Iterable[Unused] = (),
) -> int:
    """Train, or print the plan; return the exit status.

    Args:
        settings: The run's settings.
        console: Shows progress.
        resume: Continue the run in the folder.
        dry_run: Print the plan and exit without writing anything.
        describe: Returns the plan as text, given the agent loop's lines.
        launch: Trains in a folder that this process has locked; returns the exit status.
        check: Checks the settings, given problems that are known already, and reads the inputs.
        also_refused: Further problems, from settings that only this trainer has.
        also_unused: Rules about settings that only this trainer has.

    Raises:
        SettingsError: A setting is impossible, or the folder is in use.
        DataError: A user's file cannot be used.
    """
    if resume or settings.run.if_exists == "resume":
        require_format(settings.run_folder)
    with console.phase("checking settings and files", is_brief=True):
        settings = choose_date(settings, resume=resume)
        lacking = list(machine_problems(settings))
        problems = [*also_refused, *trainable_problems(settings), *([] if dry_run else lacking)]
        settings, inputs, lines, notes = check(settings, problems)
        settings = choose_products(settings, resume=resume)
    for note in (*notes, *unused_settings(settings, also_unused)):
        console.say(f"note: {note}")
    if dry_run:
        for problem in lacking:
            console.say(f"warning: a run on this machine would be refused: {problem}")
        folder = RunFolder(settings.run_folder)
        if resume:
            require_resumable(folder, settings)
        elif settings.run.if_exists == "refuse":
            require_free(folder)
        console.close()  # flush its output first
        say(describe(settings, inputs, lines))
        return 0
    with open_run(settings, resume=resume, say=console.say) as folder:
        return asyncio.run(launch(settings, with_kept_images(settings, inputs), folder, console))
