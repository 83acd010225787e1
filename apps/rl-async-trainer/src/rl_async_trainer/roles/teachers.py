"""The teachers' side in a role of its own: it leases what arrives, has it scored, and acks."""

import asyncio
import time
from pathlib import Path
from typing import Any

from rl_async_trainer.settings import AsyncSettings
from rl_core import TransferQueue
from rl_core.cluster.role_report import RoleView, Wait
from rl_core.errors import NotReadyError
from rl_distill.teacher.service import TeacherService
from rl_trainer.learning.distillation import teacher_metrics
from rl_trainer.learning.teachers import make_teachers


class TeacherHost:
    """Holds the service of the settings' teachers; one for a run."""

    def __init__(self, settings: AsyncSettings, queue: TransferQueue, *, folder: Path) -> None:
        """Name what is needed; nothing heavy starts before `start`.

        Args:
            settings: Of the run.
            queue: Has what is scored.
            folder: The run's.
        """
        self._settings = settings
        self._queue = queue
        self._folder = folder
        self._service: TeacherService | None = None
        self._events: list[dict[str, Any]] = []
        self._window_began = time.monotonic()

    async def start(self) -> None:
        """Start every teacher.

        Raises:
            TeacherError: One cannot start.
        """
        self._service = make_teachers(self._settings, log_directory=self._folder / "logs", say=self._say)
        if self._service is not None:
            await self._service.start()
        self._window_began = time.monotonic()

    async def serve(self) -> None:
        """Score what arrives, until the run ends.

        Raises:
            TeacherError: A teacher gives what cannot be trained on, or none is left.
        """
        await self._started.serve_while(self._queue, asyncio.Event().wait())

    async def issued(self) -> None:
        """Say that prompts were issued: there may be something to lease."""
        await self._started.issued()

    async def window(self) -> dict[str, Any]:
        """`metrics` and `events` since the last call."""
        report, now = self._started.take_report(), time.monotonic()
        elapsed_s, self._window_began = now - self._window_began, now
        num_tokens = sum(one.num_tokens for one in report.teachers.values())
        events, self._events = self._events, []
        metrics = teacher_metrics(report) | {"perf/teacher_tokens_per_s": num_tokens / max(elapsed_s, 1e-9)}
        return {"metrics": metrics, "events": events}

    async def report(self) -> RoleView:
        """What it does, for `status`, and for who looks for the reason of a hang."""
        if self._service is None:
            return RoleView(doing="nothing yet")
        scoring = self._service.scoring
        waits: tuple[Wait, ...] = ()
        if scoring:
            oldest = scoring[0]
            what = f"the scores of {len(scoring)} group(s), the oldest {oldest.prompt_uid}"
            on = f"teacher {', '.join(map(repr, oldest.teachers))}"
            waits = (Wait(what=what, on=on, since_s=time.time() - oldest.since),)
        return RoleView(
            doing="scores what arrives",
            waits=waits,
            holds=tuple(one.prompt_uid for one in scoring),
            counts={"groups": float(len(scoring))},
        )

    async def close(self) -> None:
        """End every teacher. Can be called twice."""
        service, self._service = self._service, None
        if service is not None:
            await service.close()

    def _say(self, event: str, /, **fields: Any) -> None:
        self._events.append({"event": event, **fields})

    @property
    def _started(self) -> TeacherService:
        if self._service is None:
            raise NotReadyError("the teachers have not been started.")
        return self._service
