"""What every role is doing: for `status`, `scale` and hang.json, and to kill a role that does not answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rl_async_trainer.controller.links import LearnerLink, RollouterLink
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.roles.learner import RunLearner
from rl_async_trainer.roles.rollouter import RunRollouter
from rl_async_trainer.settings import AsyncSettings
from rl_core import TransferQueue
from rl_core.cluster import Role, RoleReport, RoleView, count_room, describe_shares, machine_shares, process_stacks
from rl_core.errors import DeadlineError, NotReadyError, RLError, RoleDiedError
from rl_metrics.hang import HangReport, describe_trouble
from rl_rollout.schedule import Scheduler
from rl_trainer_parts.learning.start_learners import rank_pool
from rl_trainer_parts.rollouts.engines import gpus_per_replica

T = TypeVar("T")

ANSWER_S = 10.0
PARTS_S = 8.0
"""Extra time for a role to collect the answers of its own processes."""
MAX_POLL_S = 15.0
"""Maximum time between an answer and the next poll."""


async def role_views(roles: Mapping[str, Role]) -> dict[str, RoleView | None]:
    """Each role's report; None for a role that does not answer."""
    views = await asyncio.gather(*(_in_time(_asked(role, ANSWER_S).report()) for role in roles.values()))
    return dict(zip(roles, views, strict=True))


async def collect_evidence(
    roles: Mapping[str, Role], queue: TransferQueue, scheduler: Scheduler, *, folder: Path
) -> HangReport:
    """Collect the activity of every role of the run in a folder, in parallel and with a deadline."""
    with_parts = [role for name, role in roles.items() if name != "teachers"]
    views, stacks, parts, stats = await asyncio.gather(
        role_views(roles),
        asyncio.gather(*(role.stacks(deadline_s=ANSWER_S) for role in roles.values())),
        asyncio.gather(*(_in_time(_asked(role, ANSWER_S).parts(PARTS_S)) for role in with_parts)),
        _in_time(asyncio.to_thread(queue.stats)),
    )
    reports = [_controller_report(scheduler, await asyncio.to_thread(process_stacks, asyncio.get_running_loop()))]
    for (name, role), stack in zip(roles.items(), stacks, strict=True):
        view = views[name]
        reports.append(
            RoleReport(
                name=name,
                state=role.state,
                since_s=ANSWER_S if view is None else 0.0,
                doing="does not answer" if view is None else view.doing,
                stack=stack,
                counts={} if view is None else view.counts,
                is_answering=view is not None,
            )
        )
    reports += [part for of_role in parts for part in of_role or ()]
    return HangReport(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        run=str(folder),
        no_progress_s=0.0,  # filled in by the watchdog
        roles=tuple(reports),
        queue=stats or {},
        causes=describe_trouble(reports, stats or {}),
    )


def _controller_report(scheduler: Scheduler, stack: str) -> RoleReport:
    """What the next step lacks."""
    counts = {
        "steps": float(scheduler.num_steps),
        "inflight": float(scheduler.num_inflight),
        "ready": float(scheduler.num_ready),
        "waiting": float(scheduler.num_waiting),
        "served_version": float(scheduler.served_version),
    }
    doing, blockage = "", scheduler.blockage()
    if blockage is not None:
        first = f", the first {blockage.awaited[0]}" if blockage.awaited else ""
        missing = max(blockage.num_wanted - blockage.num_ready, len(blockage.awaited))
        doing = f"lacks {missing} of {blockage.num_wanted} groups of step {scheduler.num_steps + 1}{first}"
    return RoleReport(name="controller", doing=doing, counts=counts, stack=stack)


def _asked(role: Role, deadline_s: float) -> RunRollouter | RunLearner:
    """Return the methods of a role; every role has `report`, and all but the teachers `parts`."""
    methods: RunRollouter | RunLearner = role.methods(deadline_s=deadline_s)
    return methods


async def _in_time(answer: Awaitable[T]) -> T | None:
    """Wait for an answer; return None if it does not arrive in time."""
    try:
        return await asyncio.wait_for(answer, ANSWER_S)
    except (RLError, TimeoutError):
        return None


async def ask_roles(
    roles: Mapping[str, Role],
    *,
    is_started: Callable[[str], bool],
    deadline_s: float,
    say: Callable[..., None],
    progress: Callable[[str], None],
) -> None:
    """Poll roles in separate processes until cancelled; one that is silent for too long is killed and restarted.

    Without this, a stopped or starved process, or one whose event loop hangs, would block until the much longer
    deadline of its work.

    Args:
        roles: Roles by name.
        is_started: False for a role whose models are loading: it may not answer for long.
        deadline_s: Maximum silence.
        say: Logs an event.
        progress: Called when a role has done something since the last poll.
    """

    async def ask(name: str, role: Role) -> None:
        before: Mapping[str, float] = {}
        while True:
            await asyncio.sleep(min(MAX_POLL_S, deadline_s / 4))
            if not is_started(name):
                continue
            incarnation = role.incarnation
            try:
                view = await _asked(role, deadline_s).report()
            except (RoleDiedError, NotReadyError):
                continue  # the link that calls it restarts it
            except DeadlineError:
                if role.incarnation == incarnation and is_started(name):
                    say("role_silent", role=name, silent_s=deadline_s)
                    await role.fail(f"did not answer for {deadline_s:g} s and was killed")
                continue
            if view.counts != before:
                before = view.counts
                progress(f"{name} works")

    await asyncio.gather(*(ask(name, role) for name, role in roles.items()))


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
