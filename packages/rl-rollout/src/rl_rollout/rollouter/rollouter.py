"""The rollouter, which generates groups, puts complete ones into a queue, and updates weights meanwhile."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rl_core import TransferQueue
from rl_core.cluster import RoleReport, RoleView, process_report
from rl_core.data import IntArray, Prompt, Trajectory
from rl_core.errors import DeadlineError, NotReadyError, RolloutError
from rl_core.record_fields import settings_record
from rl_core.weights import Canary, ProofTolerances, PublishReport, WeightUpdate
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.replicas.replica import EngineLoad
from rl_rollout.rollout import GroupResult, Rollout
from rl_rollout.rollouter.group_events import (
    Dispatch,
    GroupEvent,
    Put,
    Refusals,
    generated_event,
    queued_event,
    refusal,
    settle,
)
from rl_rollout.rollouter.served_policy import PolicyScores, ServedPolicy
from rl_rollout.skip import GroupwiseCache

ENGINE = "engine"
Run = Callable[[Sequence[Prompt]], Awaitable[list[GroupResult]]]


@settings_record
class RollouterOptions:
    """Options of the rollouter.

    Attributes:
        group_size: Sessions per prompt.
        sampling: Sampling parameters.
        seed: Seed of the run.
        with_baseline: Run a greedy session per prompt too; see `Rollout.run`.
        deadline_s: Maximum seconds per group, and for engines to finish running requests before new weights.
        max_failures: Maximum number of consecutive groups whose sessions all fail, before the rollouter stops.
    """

    group_size: int
    sampling: SamplingParams
    seed: int | None = None
    with_baseline: bool = False
    deadline_s: float = 3600.0
    max_failures: int = 16


@dataclass(slots=True, kw_only=True)
class RolloutWindow:
    """The events between two queries.

    Attributes:
        loads: Total engine loads at the window's start.
        began: Start time, on the monotonic clock.
        events: Events for a run's log; each has its name as "event".
        groups: Settled groups, including failed sessions.
        trajectories: Trajectories of the settled groups.
        took_s: Seconds per group, from its start to the end of its last session.
        failed_sessions: Number of failed sessions.
        refused_groups: Number of groups that a filter refused.
        made_up_groups: Number of groups that train although a filter would have refused them.
    """

    loads: Sequence[EngineLoad] = ()
    began: float = field(default_factory=time.monotonic)
    events: list[dict[str, Any]] = field(default_factory=list)
    groups: list[GroupResult] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    failed_sessions: int = 0
    refused_groups: int = 0
    made_up_groups: int = 0

    @property
    def timed(self) -> list[Trajectory]:
        """Trajectories whose times count; see `GroupResult.timed`."""
        return [trajectory for group in self.groups for trajectory in group.timed]

    def say(self, event: str, /, **fields: Any) -> None:
        """Add an event."""
        self.events.append({"event": event, **fields})

    def add(self, group: GroupResult, *, took_s: float, is_refused: bool) -> None:
        """Add a settled group."""
        self.took_s.append(took_s)
        self.groups.append(group)
        self.trajectories.extend(group.trajectories)
        self.failed_sessions += len(group.failures)
        self.refused_groups += int(is_refused)


class Rollouter:
    """Generates the submitted groups, and puts complete ones into the queue.

    Its caller decides what to generate and when to replace weights. A subclass sets `engine` and `rollout`, both
    started, before any other call.

    Attributes:
        queue: Receives the generated groups.
        put: Puts trajectories into the queue; see `settle`.
        engine: The engine; None before the start.
        rollout: The agent loop on the engine, with its rewards; None before the start.
        stored: Replays and stores groups. None generates all.
        refusals: Filters groups. None keeps all.
        opened: Closed at the end, before the engine.
    """

    def __init__(self, queue: TransferQueue, options: RollouterOptions, *, put: Put | None = None) -> None:
        """Initialize without starting anything.

        Args:
            queue: Receives the generated groups.
            options: The rollouter's options.
            put: See `put`.
        """
        self.queue = queue
        self._options = options
        self.put = put
        self.engine: ReplicatedEngine | None = None
        self.rollout: Rollout | None = None
        self.stored: GroupwiseCache | None = None
        self.refusals: Refusals | None = None
        self.opened = ExitStack()
        self._window = RolloutWindow()
        self._served = ServedPolicy()
        self._running: dict[str, tuple[float, int]] = {}  # start time, and the version served at that time
        self._settling = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: list[GroupEvent] = []
        self._news = asyncio.Condition()
        self._failure: BaseException | None = None
        self._num_failed = 0

    async def publish(
        self, update: WeightUpdate, canary: Canary, tolerances: ProofTolerances, drain: bool = False
    ) -> PublishReport:
        """Send an update to every engine, and prove that each serves it.

        Args:
            update: The weights.
            canary: Sequences for the proof, with the learner's logprobs.
            tolerances: Tolerances of the proof.
            drain: Let each engine finish its requests first, for at most `deadline_s`.

        Raises:
            DeadlineError: An engine did not finish in time.
            WeightProofError: An engine serves other weights.
        """
        engine, deadline_s = self._started[0], self._options.deadline_s
        with self._served.changing(update.version):
            report = await engine.publish(
                update, canary=canary, tolerances=tolerances, drain=drain, drain_deadline_s=deadline_s
            )
        if self.refusals is not None:
            self.refusals.updated()
        return report

    async def lacks_weights(self) -> bool:
        """Return True while a restarted engine serves nothing because the weights that it missed no longer exist."""
        return self.engine is not None and self.engine.is_waiting_for_weights

    async def submit(self, dispatches: Sequence[Dispatch]) -> None:
        """Start to generate groups. Those of one call start together, in order.

        Raises:
            NotReadyError: No weights have been published to it yet.
        """
        self._check()
        if self._served.version < 0:
            raise NotReadyError(
                "the rollouter has no weights of the run yet and cannot generate. Publish weights first."
            )
        begun = time.monotonic(), self._served.version
        self._running.update(dict.fromkeys((one.prompt.uid for one in dispatches), begun))
        self._spawn(self._generate(dispatches))

    async def events(self, *, wait_s: float) -> list[GroupEvent]:
        """Return outcomes of groups since the last call. Waits for the first; returns none on timeout.

        Raises:
            DeadlineError: A group took longer than `deadline_s`.
            Exception: The error that ended the generation.
        """
        async with self._news:
            try:
                await asyncio.wait_for(self._news.wait_for(self._has_news), wait_s)
            except TimeoutError:
                self._check_ages()
            self._check()
            found, self._events = self._events, []
            return found

    @property
    def served_version(self) -> int | None:
        """See `ServedPolicy.settled_version`."""
        return self._served.settled_version

    async def probe(self, sequences: Sequence[IntArray], top_k: int) -> PolicyScores:
        """Return the served policy's scores of tokens. See `ServedPolicy.scores`."""
        return await self._served.scores(self._started[0], sequences, top_k)

    def take_window(self) -> tuple[RolloutWindow, Sequence[EngineLoad]]:
        """Return the events since the last call with the engines' current loads, and start the next window."""
        loads, window = self._started[0].loads(), self._window
        if self.refusals is not None:
            window.made_up_groups, self.refusals.num_made_up = self.refusals.num_made_up, 0
        self._window = RolloutWindow(loads=loads)
        return window, loads

    async def scale(self, count: int, make: Callable[[int], RolloutEngine]) -> int:
        """Add or remove engines while requests continue. Return the new number.

        Args:
            count: The new number.
            make: Creates another engine by its index, not started.

        Raises:
            NotReadyError: No engine would be left.
        """
        engine = self._started[0]
        if count < 1:
            raise NotReadyError(f"a run needs at least one engine; found {count}.")
        while engine.num_replicas < count:
            index = max(load.index for load in engine.loads()) + 1
            await engine.add(make(index))
            self.say("engine_added", index=index)
        while engine.num_replicas > count:
            index = max(load.index for load in engine.loads())
            await engine.remove(index)
            self.say("engine_removed", index=index)
        return engine.num_replicas

    async def report(self) -> RoleView:
        """Report the work in progress, for `status` and hang diagnosis."""
        running = self._running
        loads = [] if self.engine is None else self.engine.loads()
        num_running = sum(load.num_running for load in loads)
        others = [load.state for load in loads if load.state != "serving"]
        doing = [f"{_counted(len(running), 'group')} in progress"]
        if running:
            uid, (since, _) = min(running.items(), key=lambda item: item[1][0])
            doing.append(f"the oldest {uid} for {time.monotonic() - since:.0f} s")
        doing.append(f"{_counted(num_running, 'response')} in {_counted(len(loads) - len(others), 'engine')}")
        if others:
            doing.append(f"others {', '.join(others)}")
        if self.rollout is not None and (num_scoring := self.rollout.scorer.num_scoring):
            doing.append(f"{num_scoring} in the reward {self.rollout.scorer.name}")
        if self._served.settled_version is None:
            doing.append("weights are being loaded")
        return RoleView(
            doing=", ".join(doing),
            counts={
                "groups": float(len(running)),
                "samples in engines": float(num_running),
                "tokens": float(sum(load.num_tokens for load in loads)),
            },
        )

    async def parts(self, deadline_s: float) -> list[RoleReport]:
        """Report the state of engines with their own processes."""
        if self.engine is None:
            return []
        stacks = await self.engine.stacks(deadline_s=deadline_s)
        return engine_reports(self.engine.loads(), stacks, asked_s=deadline_s)

    async def close(self) -> None:
        """Stop the work in progress, and close everything that was started. Safe to call twice."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.opened.close()
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()

    def say(self, event: str, /, **fields: Any) -> None:
        """Add an event to the current window."""
        self._window.say(event, **fields)

    # -- inside

    @property
    def _started(self) -> tuple[ReplicatedEngine, Rollout]:
        if self.engine is None or self.rollout is None:
            raise NotReadyError("the rollouter has not been started, or is closed.")
        return self.engine, self.rollout

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            self._failure = self._failure or error
            wake = asyncio.ensure_future(self._tell([]))
            wake.add_done_callback(lambda done: done.exception())

    async def _generate(self, dispatches: Sequence[Dispatch]) -> None:
        orders, stored = {one.prompt.uid: one for one in dispatches}, self.stored
        run = partial(
            self._started[1].run,
            num_sessions=self._options.group_size,
            sampling=self._options.sampling,
            seed=self._options.seed,
            with_baseline=self._options.with_baseline,
        )
        if stored is None:
            await run(
                [one.prompt for one in dispatches],
                on_group=lambda group: self._settle(group, orders[group.prompt.uid]),
            )
            return

        async with asyncio.TaskGroup() as tasks:
            for one in dispatches:
                tasks.create_task(self._replay(stored, one, run))

    async def _replay(self, stored: GroupwiseCache, one: Dispatch, run: Run) -> None:
        """Settle a stored group, or generate it; one after another, so that a step's groups precede its repetition."""
        found = await stored.find(one.place, one.prompt.uid)
        group = (await run([one.prompt]))[0] if found is None else found
        async with self._settling:
            await self._settle(group, one, is_replayed=found is not None)

    async def _settle(self, group: GroupResult, dispatch: Dispatch, *, is_replayed: bool = False) -> None:
        """Put a group into the queue, and report its outcome."""
        uid = group.prompt.uid
        now = time.monotonic()
        since, version = self._running.get(uid, (now, None))  # it may not have been submitted
        took_s = now - since
        reason = refused = None
        if self.refusals is not None and (reason := self.refusals.reason(group)) is not None:
            refused = refusal(self.refusals.name, reason)
        if self.stored is not None:
            await self.stored.settled(dispatch.place, group, is_refused=bool(refused), is_replayed=is_replayed)
        missing = frozenset(dispatch.sessions)
        await asyncio.to_thread(settle, self.queue, [group], put=self.put, only=missing, refused=refused)
        self._window.add(group, took_s=took_s, is_refused=reason is not None)
        event = await self._event_of(group, reason, missing)
        oldest = None if is_replayed else event.oldest  # the schedule takes a replayed group as new
        event = replace(event, took_s=took_s, started=version, oldest=oldest)
        self._running.pop(uid, None)
        await self._tell([event])
        self._refuse_to_fail_for_ever(group)

    async def _event_of(self, group: GroupResult, refused: str | None, missing: frozenset[int]) -> GroupEvent:
        """Return a group's outcome. If only some sessions were missing, the queue has the others."""
        if len(missing) < len(group.sessions):
            for entry in await asyncio.to_thread(self.queue.ledger):
                if entry.prompt_uid == group.prompt.uid and (event := queued_event(entry)) is not None:
                    return event
        return generated_event(group, refused=refused)

    def _refuse_to_fail_for_ever(self, group: GroupResult) -> None:
        """Raise an error if too many consecutive groups fail, which would otherwise consume all prompts."""
        self._num_failed = 0 if group.trajectories else self._num_failed + 1
        if self._num_failed >= self._options.max_failures:
            raise RolloutError(
                f"all sessions failed in {self._num_failed} consecutive groups, the last with: {group.failures[0]}"
            ) from group.error

    async def _tell(self, events: Sequence[GroupEvent]) -> None:
        async with self._news:
            self._events.extend(events)
            self._news.notify_all()

    def _has_news(self) -> bool:
        return bool(self._events) or self._failure is not None

    def _check(self) -> None:
        if self._failure is not None and not self._events:
            raise self._failure

    def _check_ages(self) -> None:
        deadline_s, now = self._options.deadline_s, time.monotonic()
        late = [uid for uid, (since, _) in self._running.items() if now - since > deadline_s]
        if late:
            raise DeadlineError(
                f"{_counted(len(late), 'group')} not generated within {deadline_s:g} s (rollout.deadline_s); "
                f"the first is {late[0]}."
            )


def engine_reports(loads: Sequence[EngineLoad], stacks: dict[int, str], *, asked_s: float) -> list[RoleReport]:
    """Report each engine with its own process.

    Args:
        loads: Loads of all engines.
        stacks: Stacks by engine index. Other engines run in the rollouter's process.
        asked_s: Minimum seconds that an unresponsive engine has not answered.
    """
    return [
        process_report(
            f"{ENGINE}[{load.index}]",
            stacks[load.index],
            asked_s=asked_s,
            state="serving" if load.state == "draining" else load.state,
            num_running=load.num_running,
        )
        for load in loads
        if load.index in stacks
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
