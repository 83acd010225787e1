"""Small asynchronous runs, in this process or in a separate one, and their files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from run_equality import differing_metrics
from tiny_run import TinyRun
from train_process import TrainProcess

ASYNC_ONLY = (
    "fully_async/",
    "weights/",
    "rollout/made_up_groups",
    "rollout/refused_groups",
    "validation/policy_version",
    "validation/is_exact",
)
"""Metrics that a synchronous run lacks, or whose sums have another order."""


def differences_from_sync(run: TinyRun, sync: TinyRun) -> list[str]:
    """Return the metrics that differ, without those that only one trainer has."""
    return [one for one in differing_metrics(run, sync) if not any(f" {name}" in one for name in ASYNC_ONLY)]


def async_settings(**settings: Any) -> dict[str, Any]:
    """Return the settings with defaults for a small run."""
    return {"roles__placement": "inline", "roles__hang_deadline_s": 120.0, **settings}


def train_async_here(run: TinyRun, *words: str, **settings: Any) -> int:
    """Run the command in this process; return the exit status."""
    import torch

    from rl_async_trainer.main import main

    num_threads = torch.get_num_threads()
    (run.folder / "released").unlink(missing_ok=True)
    try:
        return main(run.train_words(*words, **async_settings(**settings)))
    finally:
        (run.folder / "released").touch()
        torch.set_num_threads(num_threads)


@contextmanager
def async_training(run: TinyRun, *words: str, hold_after: int | None = None, **settings: Any) -> Iterator[TrainProcess]:
    """The command in a separate process, whose roles are processes; killed at the end if it still runs.

    Args:
        run: Its inputs.
        words: Further arguments, such as "--resume".
        hold_after: Number of reward calls after which every further one waits for `released`.
        settings: Settings such as trainer__steps=3; the default learner is the small one.
    """
    (run.folder / "held").unlink(missing_ok=True)
    (run.folder / "released").unlink(missing_ok=True)
    chosen = async_settings(**{"roles__placement": "process", **settings})
    process = TrainProcess(
        run.train_words(*words, **chosen),
        output=run.folder / f"output-{len(list(run.folder.glob('output-*.txt')))}.txt",
        environment={} if hold_after is None else {"TINY_RUN_HOLD_AFTER": str(hold_after)},
        module="rl_async_trainer.main",
    )
    try:
        yield process
    finally:
        process.end()


def role_pid(run: TinyRun, log: str) -> int:
    """Return the process of a role's newest incarnation, from its log.

    Args:
        run: The run.
        log: "rollouter-0", "learner-host-0" or "teachers-0".
    """
    text = (run.run_folder / "logs" / f"{log}.log").read_text()
    return int(re.findall(r"^=== \S.* incarnation \d+ pid (\d+) ", text, flags=re.M)[-1])


def run_history(folder: Path) -> Any:
    """Return the lines of a run's record."""
    from rl_async_trainer.record import read_history

    return read_history(folder)


def trained_versions(folder: Path) -> list[tuple[int, int, int]]:
    """Return the step of every trained group, with the oldest and newest version of its tokens."""
    history = run_history(folder)
    return [(step, *history.settled[uid]) for step, uids in sorted(history.steps.items()) for uid in uids]


def run_states(folder: Path) -> dict[str, str]:
    """Return the journal's entry of each training prompt of a finished run, in the order of issue."""
    from rl_async_trainer.training_run import QUEUE
    from rl_core.queue.journal.inspection import inspect_journal

    report = inspect_journal(folder / QUEUE)
    return {prompt["uid"]: prompt["state"] for prompt in report["prompts"]}
