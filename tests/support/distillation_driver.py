"""The trainer with a loop that returns two trajectories per session, and teachers that are killed while they score.

It records the rows of each step.

Usage: python -m distillation_driver FOLDER train SETTINGS.toml ...; FOLDER gets trained-0.npz, trained-1.npz, ...
"""

import itertools
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_core import Batch, Prompt
from rl_rollout.loops.options import LOOPS
from rl_rollout.loops.protocol import LoopContext, SessionResult
from rl_rollout.loops.single_turn import SingleTurnLoop

KILLED_AT = 3
"""Group that a teacher is scoring when its process is killed."""
COLUMNS = ("input_ids", "loss_mask", "teacher_logprobs", "teacher_ids", "teacher_index")


class TwoOutputsLoop(SingleTurnLoop):
    """Return two responses to each prompt as one session's first and second trajectory."""

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        found = await super().run_group(prompt, num_sessions=2 * num_sessions, context=context)
        return [
            SessionResult(
                trajectories=tuple(
                    replace(trajectory, session_index=index, output_index=output)
                    for output, one in enumerate((first, second))
                    for trajectory in one.trajectories
                ),
                failure=first.failure or second.failure,
            )
            for index, (first, second) in enumerate(zip(found[::2], found[1::2], strict=True))
        ]


def note_batches(folder: Path) -> None:
    """Write every batch before it trains."""
    from rl_trainer_parts.learning import step as learning_step

    prepare, numbers = learning_step.prepare_batch, itertools.count()

    def noting(parts: Any, batch: Batch, *arguments: Any, **options: Any) -> Batch:
        keys = np.asarray([(key.prompt_uid, str(key.session_index), str(key.output_index)) for key in batch.keys])
        columns = {name: batch.ragged(name).values for name in COLUMNS}
        np.savez(
            folder / f"trained-{next(numbers)}.npz", keys=keys, offsets=batch.ragged("input_ids").offsets, **columns
        )
        return prepare(parts, batch, *arguments, **options)

    learning_step.prepare_batch = noting


def kill_as_they_score(logs: Path) -> None:
    """Kill each teacher's process once with SIGKILL, while it scores a group."""
    from rl_distill.teacher.engine_teacher import EngineReplica
    from rl_distill.teacher.megatron_teacher import MegatronReplica

    for kind, teacher in ((EngineReplica, "even"), (MegatronReplica, "odd")):
        kind.score = _killing(kind.score, logs / f"{teacher}-0")


def _killing(score: Any, folder: Path) -> Any:
    groups = itertools.count(1)

    async def killing(self: Any, rows: Any, **options: Any) -> Any:
        if rows[0].key.prompt_uid != "probe" and next(groups) == KILLED_AT:
            (log,) = folder.glob("*.log")
            os.kill(int(re.search(r"pid[ =:]+(\d+)", log.read_text()).group(1)), signal.SIGKILL)
        return await score(self, rows, **options)

    return killing


def main(words: Sequence[str]) -> int:
    from rl_sync_trainer.main import main as trainer

    LOOPS._builtin["two_outputs"] = TwoOutputsLoop
    note_batches(Path(words[0]))
    kill_as_they_score(Path(words[0]) / "runs" / "tiny" / "logs" / "teachers")
    return trainer(words[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
