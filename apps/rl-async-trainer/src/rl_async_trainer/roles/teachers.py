"""The run's teachers: from settings, and what they report as metrics."""

from pathlib import Path
from typing import Any

from rl_async_trainer.settings import AsyncSettings
from rl_core import TransferQueue
from rl_distill.teacher import TeacherHost as BaseTeacherHost
from rl_trainer_parts.learning.distillation import teacher_metrics
from rl_trainer_parts.learning.teachers import make_teachers


class TeacherHost(BaseTeacherHost):
    """Holds the teachers of the settings; one for a run."""

    def __init__(self, settings: AsyncSettings, queue: TransferQueue, *, folder: Path) -> None:
        """Name what is needed; nothing heavy starts before `start`.

        Args:
            settings: Of the run.
            queue: Has what is scored.
            folder: The run's.
        """
        super().__init__(queue)
        self._settings = settings
        self._folder = folder

    async def start(self) -> None:
        """Make and start every teacher.

        Raises:
            TeacherError: One cannot start.
        """
        self.service = make_teachers(self._settings, log_directory=self._folder / "logs", say=self.say)
        await super().start()

    async def window(self) -> dict[str, Any]:
        """`metrics` and `events` since the last call."""
        report, events, elapsed_s = self.take_window()
        num_tokens = sum(one.num_tokens for one in report.teachers.values())
        metrics = teacher_metrics(report) | {"perf/teacher_tokens_per_s": num_tokens / max(elapsed_s, 1e-9)}
        return {"metrics": metrics, "events": events}
