"""Queues with a directory, for tests: opened, filled, and copied as a crash would leave them."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rl_core import InProcessQueue, Lease, QueueOptions, TaskSpec
from rl_core.testing import make_prompts, make_trajectory

REFERENCE = TaskSpec(name="reference", needs=frozenset({"input_ids"}), gives=frozenset({"reference_logprobs"}))
TRAIN = TaskSpec(name="train", needs=frozenset({"input_ids"}))
LATE = TaskSpec(name="train", needs=frozenset({"reference_logprobs"}))
LARGE = 20_000
"""Tokens of a row that gets its own slot."""


@contextmanager
def open_queues() -> Iterator[Callable[..., InProcessQueue]]:
    """Opens queues, by default with TRAIN, and closes them at the end."""
    queues: list[InProcessQueue] = []

    def opened(directory: Path, *tasks: TaskSpec, **options: Any) -> InProcessQueue:
        queue = InProcessQueue(tasks or (TRAIN,), options=QueueOptions(directory=directory, **options))
        queues.append(queue)
        return queue

    yield opened
    for queue in queues:
        queue.close()


def crashed(directory: Path) -> Path:
    """Copy the directory as a crash would leave it now."""
    copy = directory.with_name(f"{directory.name}-crashed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    return copy


def put(queue: InProcessQueue, uid: str, session: int = 0, *, large: bool = False) -> None:
    """Put one row."""
    queue.put(uid, session, [make_trajectory(uid, session, num_response_tokens=LARGE if large else 3)])


def ready(queue: InProcessQueue, *, num_prompts: int = 1, num_sessions: int = 1, large: bool = False) -> InProcessQueue:
    """Return the queue with prompts whose rows are complete."""
    queue.issue(make_prompts(num_prompts), num_sessions=num_sessions)
    for prompt in make_prompts(num_prompts):
        for session in range(num_sessions):
            put(queue, prompt.uid, session, large=large)
    return queue


def entries(queue: InProcessQueue) -> list[dict[str, Any]]:
    """Return the ledger in a form to compare."""
    return [msgspec.to_builtins(entry) for entry in queue.ledger()]


def uids_of(lease: Lease) -> list[str]:
    """Return leased prompts, in the lease's order."""
    return [prompt.uid for prompt in lease.prompts]
