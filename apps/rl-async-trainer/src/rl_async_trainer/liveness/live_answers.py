"""A live run's answers to `status` and `scale`."""

from collections.abc import Mapping
from typing import Any

from rl_async_trainer.controller.links import LearnerLink, RollouterLink
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.liveness.role_activity import role_views
from rl_async_trainer.settings import AsyncSettings
from rl_core.cluster import count_room, describe_shares, machine_shares
from rl_core.errors import NotReadyError
from rl_trainer_parts.learning.start_learners import rank_pool
from rl_trainer_parts.rollouts.engines import gpus_per_replica


async def answer_request(
    parts: ControllerParts, learner: LearnerLink, rollouter: RollouterLink, request: Mapping[str, Any]
) -> Any:
    """Answer a request to a live run.

    Args:
        parts: Shared parts of the controller.
        learner: Sends weights to as many engines as it expects.
        rollouter: Adds and removes engines.
        request: Request from the control socket.

    Raises:
        NotReadyError: The request is invalid or cannot be fulfilled.
    """
    if request.get("do") == "status":
        return await _status(parts)
    count = request.get("engines")
    if request.get("do") == "scale" and isinstance(count, int):
        _require_room(parts.settings, count)
        if count >= 1:
            await learner.expect_engines(count)
        num_engines = await rollouter.set_num_engines(count)
        parts.lifecycle.say("engines_changed", count=num_engines)
        return num_engines
    raise NotReadyError(f'a request must be {{"do": "status"}} or {{"do": "scale", "engines": N}}; found {request!r}.')


async def _status(parts: ControllerParts) -> dict[str, Any]:
    scheduler = parts.scheduler
    blockage = scheduler.blockage()
    views = await role_views(parts.roles)
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
            name: ("" if role.state == "serving" else f"{role.state}; ")
            + ("does not answer" if (view := views[name]) is None else view.doing)
            for name, role in parts.roles.items()
        },
    }


def _require_room(settings: AsyncSettings, count: int) -> None:
    """Refuse more engines than this machine can hold beside the learner, given their reserved resources.

    An engine without reserved resources needs one CPU. On a joined cluster, Ray checks its resources.

    Raises:
        NotReadyError: There are too few CPUs or GPUs.
    """
    is_elsewhere = settings.cluster.ray_address is not None
    if settings.rollout.placement == "inline" or is_elsewhere or count <= settings.replicas.count:
        return
    there, ranks = machine_shares(), rank_pool(settings)
    gpus = gpus_per_replica(settings)
    cpus = settings.replicas.cpus or float(not gpus)
    beside = ""
    if ranks is not None:
        for _ in range(ranks.size):
            there.take(ranks.cpus, ranks.gpus)
        beside = (
            f", {describe_shares(there.free_cpus, sum(there.free_gpus.values()))} of them not reserved for the learner"
        )
    room = count_room(there, cpus, gpus, at_most=count)
    if room < count:
        raise NotReadyError(
            f"{count} engines need {describe_shares(cpus, gpus)} each; this machine has "
            f"{describe_shares(there.cpus, len(there.gpus))}{beside}: room for {room}. Request at most that many."
        )
