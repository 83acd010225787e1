"""Roles of an asynchronous run that are killed when the policy is asked about tokens, the first time."""

import os
import signal
from pathlib import Path

from rl_async_trainer.messages import ProbeOrder
from rl_async_trainer.roles.learner import LearnerHost
from rl_async_trainer.roles.rollouter import Rollouter
from rl_rollout.rollouter.served_policy import PolicyScores

DIED = "died_at_a_probe"


class MortalRollouter(Rollouter):
    """The trainer's rollouter, killed by the first probe."""

    async def probe(self, order: ProbeOrder) -> PolicyScores:
        """Die, or answer."""
        die_once(self._settings.run_folder)
        return await super().probe(order)


class MortalLearnerHost(LearnerHost):
    """The trainer's learner host, killed by the first probe."""

    async def probe(self, order: ProbeOrder) -> PolicyScores:
        """Die, or answer."""
        die_once(self._settings.run_folder)
        return await super().probe(order)


def die_once(folder: Path) -> None:
    """Kill this process, where none of the run was killed before."""
    if not (folder / DIED).exists():
        (folder / DIED).touch()
        os.kill(os.getpid(), signal.SIGKILL)
