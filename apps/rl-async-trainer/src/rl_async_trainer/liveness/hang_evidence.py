"""Collect the activity of every role, for hang.json and `status`, in parallel and with a deadline."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rl_async_trainer.assemble import Roles
from rl_core import TransferQueue
from rl_core.cluster import Role, RoleReport, RoleView, process_stacks
from rl_core.errors import RLError
from rl_metrics.hang import HangReport, describe_trouble
from rl_rollout.schedule import Scheduler

T = TypeVar("T")

ANSWER_S = 10.0
PARTS_S = 8.0
"""Extra time for a role to collect the answers of its own processes."""


class HangEvidence:
    """Collects evidence from all roles."""

    def __init__(self, roles: Roles, queue: TransferQueue, scheduler: Scheduler, *, folder: Path) -> None:
        """Set the run's parts.

        Args:
            roles: The run's roles.
            queue: The queue between them.
            scheduler: The run's scheduler.
            folder: The run's folder.
        """
        self._roles = roles
        self._queue = queue
        self._scheduler = scheduler
        self._folder = folder

    async def views(self) -> dict[str, RoleView | None]:
        """Each role's report; None for a role that does not answer."""
        asked = await asyncio.gather(*(_answer(role, "report") for role in self._roles.all.values()))
        return dict(zip(self._roles.all, asked, strict=True))

    async def collect(self) -> HangReport:
        """All evidence."""
        roles = self._roles.all
        views, stacks, parts, stats = await asyncio.gather(
            self.views(),
            asyncio.gather(*(role.stacks(deadline_s=ANSWER_S) for role in roles.values())),
            asyncio.gather(*(_answer(role, "parts", PARTS_S) for role in (self._roles.rollouter, self._roles.learner))),
            _in_time(self._queue.stats),
        )
        stats = stats or {}
        reports = [self._of_controller(await asyncio.to_thread(process_stacks, asyncio.get_running_loop()))]
        for (name, role), stack in zip(roles.items(), stacks, strict=True):
            view = views[name] or RoleView(doing="does not answer")
            silent_s = ANSWER_S if views[name] is None else 0.0
            reports.append(
                RoleReport(
                    name=name,
                    state=role.state,
                    since_s=silent_s,
                    doing=view.doing,
                    stack=stack,
                    counts=view.counts,
                    is_answering=views[name] is not None,
                )
            )
        reports += [part for of_role in parts for part in of_role or ()]
        return HangReport(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            run=str(self._folder),
            no_progress_s=0.0,  # filled in by the watchdog
            roles=tuple(reports),
            queue=stats,
            causes=describe_trouble(reports, stats),
        )

    def _of_controller(self, stack: str) -> RoleReport:
        scheduler = self._scheduler
        counts = {
            "steps": float(scheduler.num_steps),
            "inflight": float(scheduler.num_inflight),
            "ready": float(scheduler.num_ready),
            "waiting": float(scheduler.num_waiting),
            "served_version": float(scheduler.served_version),
        }
        return RoleReport(name="controller", doing=_describe(scheduler), counts=counts, stack=stack)


def _describe(scheduler: Scheduler) -> str:
    """What the next step lacks."""
    blockage, step = scheduler.blockage(), scheduler.num_steps + 1
    if scheduler.is_done or blockage is None:
        return ""
    first = f", the first {blockage.awaited[0]}" if blockage.awaited else ""
    missing = max(blockage.num_wanted - blockage.num_ready, len(blockage.awaited))
    return f"lacks {missing} of {blockage.num_wanted} groups of step {step}{first}"


async def _answer(role: Role, method: str, *args: Any) -> Any:
    """Call a role's method; return None if it does not answer in time."""
    try:
        return await role.call(method, *args, deadline_s=ANSWER_S)
    except RLError:
        return None


async def _in_time(ask: Callable[[], T]) -> T | None:
    """Call a method of the queue; return None if it does not answer in time."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(ask), ANSWER_S)
    except (RLError, TimeoutError):
        return None
