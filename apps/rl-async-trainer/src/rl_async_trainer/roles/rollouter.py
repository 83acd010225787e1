"""The rollouter: engines, agent loop and rewards in a role of their own; groups go straight into the queue."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_async_trainer.controller.group_events import Refusals, generated_event, queued_event, refusal
from rl_async_trainer.messages import Dispatch, GroupEvent, ProbeOrder, ValidationBatch
from rl_async_trainer.roles.parts import ENGINE, engine_reports, role_memory_watch
from rl_async_trainer.roles.rollout_window import RolloutWindow
from rl_async_trainer.roles.served_policy import ServedPolicy
from rl_async_trainer.settings import AsyncSettings
from rl_core import Canary, Prompt, TransferQueue
from rl_core.cluster.role_report import RoleReport, RoleView, Wait
from rl_core.errors import DeadlineError, NotReadyError, RolloutError
from rl_core.weights.publish import ProofTolerances, PublishReport, retry_proof
from rl_core.weights.update import WeightUpdate
from rl_rollout.engines.replicas.engine import ReplicatedEngine, publish_to
from rl_rollout.rollout import GroupResult, Rollout
from rl_rollout.skip import EntryKey
from rl_trainer.reporting.token_probes import PolicyScores
from rl_trainer.rollouts.answers import Answer, answers_of
from rl_trainer.rollouts.engines import make_engine, make_replica, replica_pool, start_within
from rl_trainer.rollouts.evaluation import answer_problems
from rl_trainer.rollouts.inputs import read_tokenizer
from rl_trainer.rollouts.setup import open_rollout, sampling_params, settle
from rl_trainer.rollouts.skip_cache import SkipCacheReplay

RunGroups = Callable[[Sequence[Prompt]], Awaitable[list[GroupResult]]]


@dataclass(frozen=True, slots=True)
class _Running:
    """A group that is generated: since when, and the version that was served then."""

    since: float
    version: int


@dataclass(slots=True)
class _State:
    """What is under way."""

    running: dict[str, _Running] = field(default_factory=dict)
    validating: dict[str, float] = field(default_factory=dict)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    events: list[GroupEvent] = field(default_factory=list)
    failure: BaseException | None = None
    num_failed: int = 0


def awaited_outside(rollout: Rollout) -> str:
    """Whom sessions wait for that no engine works on."""
    return f"the reward {rollout.scorer.name}" if rollout.scorer.num_scoring else "tools"


FAILED_STEPS = 2
"""Steps' worth of groups that may fail in a row; on policy a whole step is among them, which ends a run as well."""


class Rollouter:
    """Generates what it is told to, and puts whole groups into the queue; one for a run.

    It decides nothing: the controller says what to generate, and when weights are replaced.
    """

    def __init__(
        self,
        settings: AsyncSettings,
        queue: TransferQueue,
        *,
        log_directory: Path | None = None,
    ) -> None:
        """Name what is needed; nothing heavy starts before `start`.

        Args:
            settings: Of the run.
            queue: Takes what is generated.
            log_directory: Where engines in processes of their own write what they print.
        """
        self._settings = settings
        self._queue = queue
        self._log_directory = log_directory
        self._engine: ReplicatedEngine | None = None
        self._rollout: Rollout | None = None
        self._opened = ExitStack()
        self._replay: SkipCacheReplay | None = None
        self._refusals: Refusals | None = None
        self._state = _State()
        self._news = asyncio.Condition()
        self._window = RolloutWindow()
        self._served = ServedPolicy()
        self._memory = role_memory_watch(settings, "rollouter", say=self._window.say)

    async def start(self) -> str:
        """Start engines, rewards and tools; gives the engine's name.

        Raises:
            EngineError: An engine cannot start.
            DeadlineError: It took too long.
        """
        settings = self._settings
        tokenizer = read_tokenizer(settings)
        self._refusals = Refusals(settings, self._window)
        self._engine = self.make_engine()
        await start_within(self._engine, settings)
        self._rollout = self._opened.enter_context(open_rollout(settings, tokenizer, self._engine))
        await self._rollout.start()
        self._replay = SkipCacheReplay(settings, tokenizer, say=self._window.say)
        return self._engine.traits.name

    def make_engine(self) -> ReplicatedEngine:
        """The engines of the settings, not started."""
        engine = make_engine(self._settings, self._settings.policy.path, log_directory=self._log_directory)
        return engine if isinstance(engine, ReplicatedEngine) else ReplicatedEngine([engine])

    async def publish(
        self, update: WeightUpdate, canary: Canary, tolerances: ProofTolerances, drain: bool = False
    ) -> PublishReport:
        """Give an update to every engine, and prove that each serves it; a failed proof is tried once more.

        Args:
            update: The weights.
            canary: What must come out.
            tolerances: How far it may be off.
            drain: Let each engine finish what it has first, for at most `rollout.deadline_s`.

        Raises:
            DeadlineError: An engine did not finish.
            WeightProofError: The second proof failed too.
        """
        engine = self._started[0]
        drained = partial(publish_to, drain=drain, drain_deadline_s=self._settings.rollout.deadline_s)
        waiting = self._window.waiting(f"version {update.version} to be taken", on=ENGINE)
        with waiting, self._served.changing(update.version):
            report = await retry_proof(
                partial(drained, engine, update, canary=canary, tolerances=tolerances),
                on_failure=lambda error: self._window.say(
                    "weight_proof_failed", version=update.version, tensor=error.tensor, error=str(error)
                ),
            )
        self._window.version = update.version
        if self._refusals is not None:
            self._refusals.updated()
        if self._replay is not None:
            self._replay.served(report, engine=engine.traits.name)
        return report

    async def lacks_weights(self) -> bool:
        """True while an engine that was started again serves nothing, because the weights that it missed are gone."""
        return self._engine is not None and self._engine.is_waiting_for_weights

    async def submit(self, dispatches: Sequence[Dispatch]) -> None:
        """Begin to generate groups; those of one call are asked together, in order.

        Raises:
            NotReadyError: No weights were published to it yet.
        """
        self._check()
        if self._window.version < 0:
            raise NotReadyError("the rollouter has no weights of the run yet, and cannot generate for it.")
        begun = _Running(time.monotonic(), self._window.version)
        self._state.running.update(dict.fromkeys((one.prompt.uid for one in dispatches), begun))
        self._spawn(self._generate(dispatches))

    async def events(self, *, wait_s: float) -> list[GroupEvent]:
        """What became of groups since the last call; waits for the first, and gives none when the time is up.

        Raises:
            DeadlineError: A group took longer than rollout.deadline_s.
            Exception: What ended the generation.
        """
        async with self._news:
            try:
                await asyncio.wait_for(self._news.wait_for(self._has_news), wait_s)
            except TimeoutError:
                self._check_ages()
            self._check()
            found, self._state.events = self._state.events, []
            return found

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """Answer validation problems."""
        rollout = self._started[1]
        name = f"validation batch {batch.number} of step {batch.step}"
        self._state.validating[name] = time.monotonic()
        try:
            return answers_of(await answer_problems(self._settings, rollout, batch.prompts), source="rollouter")
        finally:
            del self._state.validating[name]

    async def probe(self, order: ProbeOrder) -> PolicyScores:
        """What the served policy thinks of tokens."""
        return await self._served.scores(self._started[0], order)

    async def window(self) -> dict[str, Any]:
        """Metrics, distributions and events since the last call; see `RolloutWindow.take`."""
        memory = {} if self._memory is None else self._memory.step()
        found = self._window.take(self._started[0].loads())
        return {**found, "metrics": {**found["metrics"], **memory}}

    async def set_num_engines(self, count: int) -> int:
        """Add engines or take some away, while everything goes on; gives how many there are now.

        Raises:
            NotReadyError: The engine lives in this process, or none would be left.
        """
        engine = self._started[0]
        if self._settings.rollout.placement == "inline":
            raise NotReadyError(
                "engines can be added and taken away where they have processes of their own: set rollout.placement = "
                '"process" or "ray".'
            )
        if count < 1:
            raise NotReadyError(f"a run needs at least one engine; found {count}.")
        while engine.num_replicas < count:
            index = max(load.index for load in engine.loads()) + 1
            pool = replica_pool(self._settings)
            own = None if pool is None else replace(pool, name=f"{pool.name} {index}", size=1)
            policy, logs = self._settings.policy.path, self._log_directory
            await engine.add(make_replica(self._settings, policy, index=index, pool=own, log_directory=logs))
            self._window.say("engine_added", index=index)
        while engine.num_replicas > count:
            index = max(load.index for load in engine.loads())
            await engine.remove(index)
            self._window.say("engine_removed", index=index)
        return engine.num_replicas

    async def report(self) -> RoleView:
        """What is under way, for `status`, and for who looks for the reason of a hang."""
        now, running = time.monotonic(), self._state.running
        loads = [] if self._engine is None else self._engine.loads()
        num_running = sum(load.num_running for load in loads)
        waits = [Wait(what=what, on=on, since_s=since_s) for what, on, since_s in self._window.waits(now)]
        on = ENGINE if num_running or self._rollout is None else awaited_outside(self._rollout)
        if running:
            uid, begun = min(running.items(), key=lambda item: item[1].since)
            waits.append(Wait(what=f"{len(running)} group(s), the oldest {uid}", on=on, since_s=now - begun.since))
        waits.extend(Wait(what=name, on=on, since_s=now - since) for name, since in self._state.validating.items())
        return RoleView(
            doing=f"serves version {self._window.version}; engines {', '.join(load.state for load in loads)}",
            waits=tuple(waits),
            holds=tuple(running),
            counts={
                "groups": float(len(running)),
                "samples in engines": float(num_running),
                "tokens": float(sum(load.num_tokens for load in loads)),
            },
        )

    async def parts(self, deadline_s: float) -> list[RoleReport]:
        """What the engines do that have processes of their own."""
        if self._engine is None:
            return []
        stacks = await self._engine.stacks(deadline_s=deadline_s)
        return engine_reports(self._engine.loads(), stacks, asked_s=deadline_s)

    async def close(self) -> None:
        """End what is under way, and everything that was started. Can be called twice."""
        tasks, self._state.tasks = self._state.tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._opened.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    # -- inside

    @property
    def _started(self) -> tuple[ReplicatedEngine, Rollout]:
        if self._engine is None or self._rollout is None:
            raise NotReadyError("the rollouter has not been started, or is closed.")
        return self._engine, self._rollout

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._state.tasks.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: "asyncio.Task[None]") -> None:
        self._state.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            self._state.failure = self._state.failure or error
            wake = asyncio.ensure_future(self._tell([]))
            wake.add_done_callback(lambda done: done.exception())

    async def _generate(self, dispatches: Sequence[Dispatch]) -> None:
        orders = {one.prompt.uid: one for one in dispatches}
        rollout = self._started[1]

        async def run(prompts: Sequence[Prompt]) -> list[GroupResult]:
            return await rollout.run(
                prompts,
                num_sessions=self._settings.rollout.group_size,
                sampling=sampling_params(self._settings),
                seed=self._settings.run.seed,
                on_group=None if self._settings.skip.enabled else lambda group: self._settle(group, orders),
            )

        if not self._settings.skip.enabled:
            await run([one.prompt for one in dispatches])
            return

        async def replay(one: Dispatch) -> None:
            await self._settle(await self._cached(one, run), orders)

        async with asyncio.TaskGroup() as tasks:
            for one in dispatches:
                tasks.create_task(replay(one))

    async def _cached(self, one: Dispatch, run: RunGroups) -> GroupResult:
        """A group from the skip cache, or generated and stored; its key is its place in the order of feeding."""
        if self._replay is None:
            raise NotReadyError("the rollouter has not been started.")
        found = await self._replay.rollouts(
            EntryKey(step=one.order + 1),
            [one.prompt],
            lambda: run([one.prompt]),
            rollout=self._started[1],
            sampling=sampling_params(self._settings),
            num_sessions=self._settings.rollout.group_size,
        )
        if found.is_replayed:
            self._window.cached.add(one.prompt.uid)
        return found.groups[0]

    async def _settle(self, group: GroupResult, orders: dict[str, Dispatch]) -> None:
        """Put a group into the queue, and tell the controller."""
        uid = group.prompt.uid
        begun = self._state.running.get(uid)  # None where it was not submitted
        took_s = 0.0 if begun is None else time.monotonic() - begun.since
        reason = None if self._refusals is None else self._refusals.reason(group)
        missing = frozenset(orders[uid].sessions)
        with self._window.waiting(f"put group {uid}", on="queue"):
            if reason is None:
                await asyncio.to_thread(settle, self._queue, self._settings, [group], only=missing)
            else:
                await asyncio.to_thread(self._refuse, group, reason, missing)
        self._window.add(group, took_s=took_s, is_refused=reason is not None)
        event = await self._event_of(group, reason, missing)
        event = replace(event, took_s=took_s, started=None if begun is None else begun.version)
        self._state.running.pop(uid, None)
        await self._tell([event])
        self._refuse_to_fail_for_ever(group)

    async def _event_of(self, group: GroupResult, refused: str | None, missing: frozenset[int]) -> GroupEvent:
        """What became of a group; where only some sessions were missing, the queue has the others."""
        if len(missing) < len(group.sessions):
            for entry in await asyncio.to_thread(self._queue.ledger):
                if entry.prompt_uid == group.prompt.uid and (event := queued_event(entry)) is not None:
                    return event
        return generated_event(group, refused=refused)

    def _refuse_to_fail_for_ever(self, group: GroupResult) -> None:
        """End the run where nothing succeeds any more: other prompts would be used up one after the other."""
        self._state.num_failed = 0 if group.trajectories else self._state.num_failed + 1
        if self._state.num_failed >= FAILED_STEPS * self._settings.rollout.prompts_per_step:
            raise RolloutError(
                f"{self._state.num_failed} groups in a row failed whole, the last with: {group.failures[0]}"
            ) from group.error

    def _refuse(self, group: GroupResult, reason: str, missing: frozenset[int]) -> None:
        for index in sorted(missing):
            self._queue.fail(group.prompt.uid, index, reason=refusal(self._settings.refill.filter, reason))

    async def _tell(self, events: Sequence[GroupEvent]) -> None:
        async with self._news:
            self._state.events.extend(events)
            self._news.notify_all()

    def _has_news(self) -> bool:
        return bool(self._state.events) or self._state.failure is not None

    def _check(self) -> None:
        failure = self._state.failure
        if failure is not None and not self._state.events:
            raise failure

    def _check_ages(self) -> None:
        deadline_s, now = self._settings.rollout.deadline_s, time.monotonic()
        late = [uid for uid, begun in self._state.running.items() if now - begun.since > deadline_s]
        if late:
            raise DeadlineError(
                f"waited {deadline_s:g} s for {len(late)} group(s) to be generated (rollout.deadline_s), and gave up; "
                f"the first is {late[0]}."
            )
