"""What every role is doing: for `status` and hang.json, and to kill a role that does not answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rl_core import TransferQueue
from rl_core.cluster import Role, RoleReport, RoleView, process_stacks
from rl_core.errors import DeadlineError, NotReadyError, RLError, RoleDiedError
from rl_metrics.hang import HangReport, describe_trouble
from rl_rollout.schedule import Scheduler

T = TypeVar("T")

ANSWER_S = 10.0
PARTS_S = 8.0
"""Extra time for a role to collect the answers of its own processes."""
MAX_POLL_S = 15.0
"""Maximum time between an answer and the next poll."""


async def role_views(roles: Mapping[str, Role]) -> dict[str, RoleView | None]:
    """Each role's report; None for a role that does not answer."""
    views = await asyncio.gather(*(_in_time(role.call("report", deadline_s=ANSWER_S)) for role in roles.values()))
    return dict(zip(roles, views, strict=True))


async def collect_evidence(
    roles: Mapping[str, Role], queue: TransferQueue, scheduler: Scheduler, *, folder: Path
) -> HangReport:
    """Collect the activity of every role of the run in a folder, in parallel and with a deadline."""
    with_parts = [role for name, role in roles.items() if name != "teachers"]
    views, stacks, parts, stats = await asyncio.gather(
        role_views(roles),
        asyncio.gather(*(role.stacks(deadline_s=ANSWER_S) for role in roles.values())),
        asyncio.gather(*(_in_time(role.call("parts", PARTS_S, deadline_s=ANSWER_S)) for role in with_parts)),
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
                view = await role.call("report", deadline_s=deadline_s)
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
