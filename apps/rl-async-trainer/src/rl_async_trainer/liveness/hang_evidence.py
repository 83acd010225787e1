"""Collect the activity of every role, for hang.json and `status`, in parallel and with a deadline."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rl_async_trainer.assemble import Roles
from rl_async_trainer.controller.validator import Validator
from rl_async_trainer.liveness.watchdog import Watchdog
from rl_core import TransferQueue
from rl_core.cluster import Role, RoleReport, RoleView, Wait, process_stacks
from rl_core.errors import RLError
from rl_core.queue import Unsettled
from rl_metrics.hang import GroupRow, HangReport, judge_hang
from rl_rollout.schedule import Scheduler

T = TypeVar("T")

ANSWER_S = 10.0
PARTS_S = 8.0
"""Extra time for a role to collect the answers of its own processes."""


class HangEvidence:
    """Collects evidence from all roles."""

    def __init__(
        self,
        roles: Roles,
        queue: TransferQueue,
        scheduler: Scheduler,
        *,
        folder: Path,
        controller_waits: Callable[[], tuple[Wait, ...]],
    ) -> None:
        """Set the run's parts.

        Args:
            roles: The run's roles.
            queue: The queue between them.
            scheduler: The run's scheduler.
            folder: The run's folder.
            controller_waits: Returns what the controller itself waits for.
        """
        self._roles = roles
        self._queue = queue
        self._scheduler = scheduler
        self._folder = folder
        self._controller_waits = controller_waits

    async def views(self) -> dict[str, RoleView | None]:
        """Each role's report; None for a role that does not answer."""
        asked = await asyncio.gather(*(_answer(role, "report") for role in self._roles.all.values()))
        return dict(zip(self._roles.all, asked, strict=True))

    async def collect(self) -> HangReport:
        """All evidence, with the verdict."""
        roles = self._roles.all
        views, stacks, parts, stats, unsettled = await asyncio.gather(
            self.views(),
            asyncio.gather(*(role.stacks(deadline_s=ANSWER_S) for role in roles.values())),
            asyncio.gather(*(_answer(role, "parts", PARTS_S) for role in (self._roles.rollouter, self._roles.learner))),
            _in_time(self._queue.stats),
            _in_time(self._queue.unsettled),
        )
        stats = stats or {}
        groups = [*self._issued(unsettled or ()), *_scored(views.get("teachers"))]
        reports = [self._of_controller(await asyncio.to_thread(process_stacks, asyncio.get_running_loop()))]
        for (name, role), stack in zip(roles.items(), stacks, strict=True):
            view = views[name] or RoleView(doing="does not answer")
            silent_s = ANSWER_S if views[name] is None else 0.0
            reports.append(
                RoleReport(
                    name=name,
                    state=role.state,
                    since_s=silent_s,
                    waits=view.waits,
                    stack=stack,
                    leases=view.holds,
                    counts=view.counts,
                    is_answering=views[name] is not None,
                )
            )
        reports += [part for of_role in parts for part in of_role or ()]
        words, causes = judge_hang(reports, stats, groups)
        return HangReport(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            run=str(self._folder),
            no_progress_s=0.0,  # filled in by the watchdog
            roles=tuple(reports),
            queue=stats,
            groups=tuple(groups),
            verdict=words,
            causes=causes,
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
        return RoleReport(name="controller", waits=self._controller_waits(), counts=counts, stack=stack)

    def _issued(self, unsettled: Sequence[Unsettled]) -> list[GroupRow]:
        inflight = set(self._scheduler.inflight)
        return [
            GroupRow(
                uid=one.prompt.uid,
                state="issued",
                missing=one.sessions,
                age_s=one.age_s,
                attempt=one.attempt,
                holder="rollouter" if one.prompt.uid in inflight else None,
            )
            for one in unsettled
        ]


def _scored(teachers: RoleView | None) -> list[GroupRow]:
    """Groups that teachers hold."""
    holds = () if teachers is None else teachers.holds
    return [GroupRow(uid=uid, state="settled", holder="teachers") for uid in holds]


def controller_waits(scheduler: Scheduler, watchdog: Watchdog, validator: Validator) -> tuple[Wait, ...]:
    """Return what the controller waits for, according to scheduler and validation."""
    validation, is_alone = validator.awaited()
    if validation is None:
        return _training_waits(scheduler, watchdog.no_progress_s)
    if is_alone or scheduler.is_done:
        return (validation,)
    return *_training_waits(scheduler, watchdog.no_progress_s), validation


def _training_waits(scheduler: Scheduler, since_s: float) -> tuple[Wait, ...]:
    if scheduler.is_done:
        return (Wait(what="the last checkpoint", on="learner", since_s=since_s),)
    blockage = scheduler.blockage()
    if blockage is None:
        return (Wait(what=f"step {scheduler.num_steps + 1}", on="learner", since_s=since_s),)
    awaited = f" (first {blockage.awaited[0]})" if blockage.awaited else ""
    missing = max(blockage.num_wanted - blockage.num_ready, len(blockage.awaited))
    what = f"{missing} of {blockage.num_wanted} groups of step {scheduler.num_steps + 1}{awaited}"
    if not scheduler.num_inflight and scheduler.learner_version > scheduler.served_version:
        return (Wait(what=f"the engines to load version {scheduler.learner_version}", on="rollouter", since_s=since_s),)
    return (Wait(what=what, on="groups" if scheduler.num_inflight else "rollouter", since_s=since_s),)


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
