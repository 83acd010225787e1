"""Roles of an asynchronous run that are killed by the first token probe."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rl_async_trainer.roles.learner import RunLearner
from rl_async_trainer.roles.rollouter import RunRollouter
from rl_core.data.records import IntArray
from rl_rollout.rollouter.served_policy import PolicyScores

DIED = "died_at_a_probe"


class MortalRollouter(RunRollouter):
    """The trainer's rollouter, killed by the first probe."""

    async def probe(self, sequences: Sequence[IntArray], top_k: int) -> PolicyScores:
        """Die, or answer."""
        die_once(self._settings.run_folder)
        return await super().probe(sequences, top_k)


class MortalLearnerHost(RunLearner):
    """The trainer's learner host, killed by the first probe."""

    async def probe(self, step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores:
        """Die, or answer."""
        die_once(self._settings.run_folder)
        return await super().probe(step, sequences, top_k)


def die_once(folder: Path) -> None:
    """Kill this process, unless a process of the run was killed before."""
    if not (folder / DIED).exists():
        (folder / DIED).touch()
        os.kill(os.getpid(), signal.SIGKILL)
