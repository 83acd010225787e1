"""Role that runs the teachers: they lease trajectories from a queue, score them, and ack."""

import asyncio
import time
from typing import Any

from rl_core import TransferQueue
from rl_core.cluster import RoleView
from rl_core.errors import NotReadyError
from rl_distill.teacher.scoring import ServiceReport
from rl_distill.teacher.service import TeacherService


class TeacherHost:
    """Runs a teacher service, which a subclass sets before the start.

    Attributes:
        service: The service; None until it is created.
    """

    def __init__(self, queue: TransferQueue) -> None:
        """Store the queue; nothing is started.

        Args:
            queue: Queue of the trajectories to score.
        """
        self._queue = queue
        self.service: TeacherService | None = None
        self._events: list[dict[str, Any]] = []
        self._window_began = time.monotonic()

    async def start(self) -> None:
        """Start every teacher.

        Raises:
            TeacherError: A teacher cannot start.
        """
        if self.service is not None:
            await self.service.start()
        self._window_began = time.monotonic()

    async def serve(self) -> None:
        """Score arriving trajectories until cancelled.

        Raises:
            TeacherError: A teacher returned invalid scores, or has no replica left.
        """
        await self._started.serve_while(self._queue, asyncio.Event().wait())

    async def issued(self) -> None:
        """Signal that prompts were issued, so that a lease may be possible."""
        await self._started.issued()

    def take_window(self) -> tuple[ServiceReport, list[dict[str, Any]], float]:
        """Return the report since the last call, its events, and the elapsed seconds."""
        report, now = self._started.take_report(), time.monotonic()
        elapsed_s, self._window_began = now - self._window_began, now
        events, self._events = self._events, []
        return report, events, elapsed_s

    async def report(self) -> RoleView:
        """Return what the role is doing, for `status` and hang diagnosis."""
        if self.service is None:
            return RoleView(doing="nothing yet")
        scoring = self.service.scoring
        doing = "waits for trajectories"
        if scoring:
            oldest = scoring[0]
            doing = (
                f"scores {len(scoring)} group{'' if len(scoring) == 1 else 's'}, the oldest {oldest.prompt_uid} for "
                f"{time.time() - oldest.since:.0f} s by teacher {', '.join(map(repr, oldest.teachers))}"
            )
        return RoleView(doing=doing, counts={"groups": float(len(scoring))})

    async def close(self) -> None:
        """Stop every teacher. Can be called twice."""
        service, self.service = self.service, None
        if service is not None:
            await service.close()

    def say(self, event: str, /, **fields: Any) -> None:
        """Record an event of the current window."""
        self._events.append({"event": event, **fields})

    @property
    def _started(self) -> TeacherService:
        if self.service is None:
            raise NotReadyError("the teachers have not started.")
        return self.service
