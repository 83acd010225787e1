"""The run's teachers, from the settings, and their metrics."""

from pathlib import Path
from typing import Any

from rl_async_trainer.settings import AsyncSettings
from rl_core import TransferQueue
from rl_core.gpus import gpu_use_of
from rl_distill.teacher import TeacherHost
from rl_metrics.reductions import summarize_gpus
from rl_trainer_parts.learning.teachers import make_teachers


class RunTeachers(TeacherHost):
    """Holds the run's teachers; one per run."""

    def __init__(self, settings: AsyncSettings, queue: TransferQueue, *, folder: Path) -> None:
        """Set the parameters; models load in `start`.

        Args:
            settings: The run's settings.
            queue: Queue with the rows to score.
            folder: The run's folder.
        """
        super().__init__(queue)
        self._settings = settings
        self._folder = folder

    async def start(self) -> None:
        """Build and start every teacher.

        Raises:
            TeacherError: A teacher cannot start.
        """
        self.service = make_teachers(self._settings, log_directory=self._folder / "logs", say=self.say)
        await super().start()

    async def window(self) -> dict[str, Any]:
        """`metrics` and `events` since the last call."""
        report, events, elapsed_s = self.take_window()
        num_tokens = sum(one.num_tokens for one in report.teachers.values())
        metrics = report.metrics() | {"perf/teacher_tokens_per_s": num_tokens / max(elapsed_s, 1e-9)}
        metrics |= summarize_gpus("teacher", await gpu_use_of(self.service))
        return {"metrics": metrics, "events": events}
