"""Starts prompts when the scheduler allows it, and receives the rollouter's results."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from rl_async_trainer.controller.links import RollouterLink, TeachersLink
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.controller.step_metrics import StepMetrics
from rl_async_trainer.record import FILE
from rl_async_trainer.restoring import ReplayScheduler
from rl_core.errors import RLError
from rl_rollout.rollouter import Dispatch, GroupEvent, queued_event
from rl_trainer_parts.rollouts.setup import proof_tolerances


class Rollouts:
    """Reports each group to the scheduler from its issue until it is ready or has failed.

    Attributes:
        link: Calls the rollouter.
        last_failure: Why the last failed group failed; before the first failure, a pointer to the record.
    """

    def __init__(
        self,
        parts: ControllerParts,
        changed: asyncio.Condition,
        metrics: StepMetrics,
        *,
        teachers: TeachersLink | None,
        on_weights_lost: Callable[[], None],
    ) -> None:
        """Start paused; prompts start after `let_feed`.

        Args:
            parts: Shared parts of the controller.
            changed: Condition that guards the scheduler and announces its changes.
            metrics: Counts dropped groups.
            teachers: Notified whenever prompts were started.
            on_weights_lost: Called, with `changed` held, when engines have no weights or missed an update.
        """
        self._parts = parts
        self._scheduler = parts.scheduler
        self._changed = changed
        self._metrics = metrics
        self._teachers = teachers
        self._on_weights_lost = on_weights_lost
        self._is_feeding = False
        self._num_lost = 0
        self.last_failure = f"in an earlier launch; see {FILE}"
        self.link = RollouterLink(
            parts.roles["rollouter"],
            tolerances=proof_tolerances(parts.settings),
            drains=not parts.settings.schedule.partial_rollout,
            on_lost=self._is_lost,
        )

    async def let_feed(self) -> None:
        """Allow prompts to start."""
        async with self._changed:
            self._is_feeding = True
            self._changed.notify_all()

    def hold(self) -> None:
        """Start no more prompts until `let_feed`."""
        self._is_feeding = False

    def waiting(self) -> AbstractContextManager[None]:
        """Show that the learner waits, and how many groups are ready."""
        scheduler = self._scheduler
        return self._parts.lifecycle.console.phase(
            "waiting for rollouts",
            is_brief=True,
            detail=lambda: f"{scheduler.num_ready} groups ready, {scheduler.num_inflight} in flight",
        )

    async def feed(self) -> None:
        """Start prompts whenever the scheduler allows it; ends only by an error."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._is_feeding and self._scheduler.num_to_start() > 0)
                dispatches = await self._next_dispatches()
                uids = [dispatch.prompt.uid for dispatch in dispatches]
                self._scheduler.started(uids)
                places = [dispatch.place for dispatch in dispatches]
                self._parts.record.write("started", uids=uids, version=self._scheduler.served_version, places=places)
                is_current = self._until_lost()
            await self.link.submit(dispatches, is_current)
            if self._teachers is not None:
                await self._teachers.issued()

    async def gather(self) -> None:
        """Receive finished groups; ends only by an error."""
        while True:
            events = await self.link.events()
            if not events and await self.link.lacks_weights():
                # A restarted engine may have missed weights that were lost with the learner.
                async with self._changed:
                    self._on_weights_lost()
            if not events:
                continue
            self._parts.progress(f"group {events[-1].uid}")
            async with self._changed:
                for event in events:
                    self._take(event)
                self._changed.notify_all()

    # -- inside

    async def _next_dispatches(self) -> list[Dispatch]:
        """Return waiting prompts, then newly issued ones."""
        waiting, num_new = self._scheduler.to_start()
        prompts = self._parts.supply.next(num_new)
        size = self._parts.settings.rollout.group_size
        if prompts:
            await asyncio.to_thread(self._parts.queue.issue, prompts, num_sessions=size)
            self._parts.record.write("issued", uids=[prompt.uid for prompt in prompts])
            self._scheduler.issued(prompt.uid for prompt in prompts)
        missing = await self._missing_sessions(waiting) | {prompt.uid: tuple(range(size)) for prompt in prompts}
        places = self._parts.places.take(missing)
        return [
            Dispatch(prompt=self._parts.supply.get(uid), place=place, sessions=missing[uid])
            for uid, place in sorted(places.items(), key=lambda item: item[1])
        ]

    async def _missing_sessions(self, waiting: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Missing sessions of groups that were in flight; complete groups are accepted."""
        if not waiting:
            return {}
        groups = await asyncio.to_thread(self._parts.queue.unsettled)
        unsettled = {group.prompt.uid: group.sessions for group in groups}
        await self._take_settled([uid for uid in waiting if uid not in unsettled])
        return {uid: unsettled[uid] for uid in waiting if uid in unsettled}

    async def _take_settled(self, uids: Collection[str]) -> None:
        """Accept groups that the queue knows as finished or failed before the rollouter died; `changed` is held."""
        if not uids:
            return
        for entry in await asyncio.to_thread(self._parts.queue.ledger):
            event = queued_event(entry) if entry.prompt_uid in uids else None
            if event is not None:
                sampled = None if event.failure else self._scheduler.sampled_since(event.uid, event.oldest)
                self._take(replace(event, oldest=sampled))
        self._changed.notify_all()

    def _take(self, event: GroupEvent) -> None:
        if not self._scheduler.is_open(event.uid):
            return  # already taken from the queue after the rollouter died
        if event.failure is None:
            versions = {"oldest": event.oldest, "newest": event.newest, "started": event.started}
            self._parts.record.write("settled", uid=event.uid, **versions)
            self._scheduler.settled(event.uid, oldest_version=event.oldest)
            return
        self._parts.record.write("failed", uid=event.uid, reason=event.failure)
        self._parts.lifecycle.say("group_failed", uid=event.uid, reason=event.failure)
        self._scheduler.failed(event.uid, is_refused=event.is_refused)
        if event.is_refused or not self._scheduler.options.is_on_policy:
            self._parts.places.vacate(event.uid)
        self._parts.supply.done([event.uid])
        self._metrics.dropped("refused" if event.is_refused else "failed")
        self.last_failure = event.failure
        if isinstance(self._scheduler, ReplayScheduler):
            self._scheduler.require_group(event.uid, failure=event.failure)

    def _until_lost(self) -> Callable[[], bool]:
        """Return a function that later tells whether groups started now were requeued after the rollouter died."""
        num_lost = self._num_lost
        return lambda: self._num_lost == num_lost

    async def _is_lost(self, error: RLError) -> None:
        """Keep groups in flight that finished before the rollouter died, and requeue the others."""
        self._parts.lifecycle.say("role_died", role="rollouter", error=str(error))
        async with self._changed:
            self._num_lost += 1
            self._on_weights_lost()
            await self._take_settled(set(self._scheduler.inflight))
            lost = self._scheduler.inflight
            if lost:
                self._parts.record.write("aborted", uids=list(lost), reason=str(error))
                self._scheduler.returned(lost)
                self._metrics.dropped("lost", len(lost))
            self._changed.notify_all()
