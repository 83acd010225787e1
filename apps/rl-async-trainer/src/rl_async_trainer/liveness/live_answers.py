"""What a live run answers to `status` and `scale`."""

from collections.abc import Mapping
from typing import Any

from rl_async_trainer.controller.learner_link import LearnerLink
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.controller.rollouter_link import RollouterLink
from rl_core.errors import NotReadyError


async def answer_request(
    parts: ControllerParts, learner: LearnerLink, rollouter: RollouterLink, request: Mapping[str, Any]
) -> Any:
    """Answer a request to a live run.

    Args:
        parts: What its controller works with.
        learner: Gives weights to as many engines as it expects.
        rollouter: Adds engines, and takes some away.
        request: Of its control socket.

    Raises:
        NotReadyError: The request is none, or cannot be done.
    """
    if request.get("do") == "status":
        return await _status(parts)
    count = request.get("engines")
    if request.get("do") == "scale" and isinstance(count, int):
        if count >= 1:
            await learner.expect_engines(count)
        found = await rollouter.set_num_engines(count)
        parts.say("engines_changed", count=found)
        return found
    raise NotReadyError(f'a run is asked {{"do": "status"}} or {{"do": "scale", "engines": N}}; found {request!r}.')


async def _status(parts: ControllerParts) -> dict[str, Any]:
    scheduler = parts.scheduler
    blockage = scheduler.blockage()
    views = await parts.evidence.views()
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
        "roles": {name: f"{role.state}; {views[name] or 'does not answer'}" for name, role in parts.roles.all.items()},
    }
