"""What a live run answers to `status` and `scale`."""

from collections.abc import Mapping
from typing import Any

from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.controller.rollouter_link import RollouterLink
from rl_core.errors import NotReadyError


class LiveAnswers:
    """Answers who asks a live run, by its control socket."""

    def __init__(self, parts: ControllerParts, rollouter: RollouterLink) -> None:
        """Answer for a controller.

        Args:
            parts: What it works with.
            rollouter: Adds engines, and takes some away.
        """
        self._parts = parts
        self._rollouter = rollouter

    async def answer(self, request: Mapping[str, Any]) -> Any:
        """Answer a request.

        Raises:
            NotReadyError: The request is none, or cannot be done.
        """
        if request.get("do") == "status":
            return await self._status()
        count = request.get("engines")
        if request.get("do") == "scale" and isinstance(count, int):
            return await self._scale(count)
        raise NotReadyError(f'a run is asked {{"do": "status"}} or {{"do": "scale", "engines": N}}; found {request!r}.')

    async def _scale(self, count: int) -> int:
        found = await self._rollouter.set_num_engines(count)
        self._parts.say("engines_changed", count=found)
        return found

    async def _status(self) -> dict[str, Any]:
        scheduler = self._parts.scheduler
        blockage = scheduler.blockage()
        views = await self._parts.evidence.views()
        return {
            "schedule": {
                "step": scheduler.num_steps,
                "steps": scheduler.options.num_steps,
                "served_version": scheduler.served_version,
                "learner_version": scheduler.learner_version,
                "inflight": scheduler.num_inflight,
                "ready": scheduler.num_ready,
                "waiting": scheduler.num_waiting,
                "blocked_by": [] if blockage is None else list(blockage.awaited),
            },
            "roles": {
                name: f"{role.state}; {views[name] or 'does not answer'}"
                for name, role in self._parts.roles.all.items()
            },
        }
