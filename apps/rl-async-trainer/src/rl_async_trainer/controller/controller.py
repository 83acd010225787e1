"""The controller: loops that carry out the scheduler's decisions.

Read `_learn` first: it trains a step as soon as one is ready. Beside it, `Rollouts` starts prompts and receives their
results, and the weight publisher sends new weights to the engines. They synchronise on one condition, `_changed`.
Weights never pass through this process. Rows do only as validation answers, whose samples go to the trackers, and as
the few trajectories of each step that are recorded.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_async_trainer.controller.checkpointing import Checkpointing
from rl_async_trainer.controller.links import LearnerLink, RoleLink, TeachersLink
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.controller.rollouts import Rollouts
from rl_async_trainer.controller.step_metrics import StepMetrics
from rl_async_trainer.controller.validator import Validator
from rl_async_trainer.controller.weight_publisher import WeightPublisher
from rl_async_trainer.liveness.role_activity import answer_request, ask_roles
from rl_async_trainer.messages import StepOrder, TrainedStep
from rl_async_trainer.record import AsyncState
from rl_core.cluster import RoleRestartedError
from rl_core.errors import CheckpointError, RLError, RolloutError
from rl_core.weights import PublishReport
from rl_distill.learner_host import PackedWeights
from rl_metrics.reductions import Histogram
from rl_trainer_parts.learning.engine_choice import engine_name
from rl_trainer_parts.learning.mixtures import learner_name
from rl_trainer_parts.run.folder import read_run_state
from rl_trainer_parts.run.stopping import StopRequestedError


class Controller:
    """Runs a training from a given state to its last step.

    Attributes:
        state: State after the last finished step.
    """

    def __init__(self, parts: ControllerParts, state: AsyncState) -> None:
        """Set the starting state; no role is called yet."""
        self.state = state
        self._parts = parts
        self._settings = parts.settings
        self._say = parts.lifecycle.say
        self._trackers = parts.lifecycle.trackers
        self._phase = parts.lifecycle.console.phase
        self._scheduler = parts.scheduler
        self._goal = parts.lifecycle.goal
        self._changed = asyncio.Condition()
        self._was_restored = False
        self._holds_versions = False  # while the engines answer a validation with the version of a checkpoint
        self._has_held = False
        self._in_step = asyncio.Lock()
        self._metrics = StepMetrics()
        self._learner = LearnerLink(
            parts.roles["learner"],
            find_checkpoint=parts.lifecycle.find_checkpoint,
            on_lost=partial(self._is_lost, "learner"),
            on_restored=self._learner_is_restored,
        )
        self._teachers: TeachersLink | None = None
        if "teachers" in parts.roles:
            self._teachers = TeachersLink(parts.roles["teachers"], on_lost=partial(self._is_lost, "teachers"))
        self._rollouts = Rollouts(
            parts,
            self._changed,
            self._metrics,
            teachers=self._teachers,
            on_weights_lost=lambda: self._weights.lost(),
        )
        self._rollouter = self._rollouts.link
        self._links: dict[str, RoleLink] = {"rollouter": self._rollouter, "learner": self._learner}
        if self._teachers is not None:
            self._links["teachers"] = self._teachers
        is_beside = self._settings.schedule.validate_on == "learner"
        self._validator = Validator(parts, self._learner if is_beside else self._rollouter)
        self._checkpoints = Checkpointing(parts, self._learner, self._metrics)
        self._weights = WeightPublisher(
            self._learner,
            self._rollouter,
            self._changed,
            deadline_s=self._settings.rollout.deadline_s,
            on_served=self._is_served,
            on_failed_proof=lambda version, error: self._say(
                "weight_proof_failed", version=version, tensor=error.tensor, error=str(error)
            ),
        )

    async def start(self) -> tuple[str, int]:
        """Load the models of all roles, in parallel; with inline roles one after the other.

        Returns the engine's name and the policy's number of parameters.

        Models must not load in parallel within one process, because transformers changes global state while it loads
        one.
        """
        alone = asyncio.Semaphore(1 if self._settings.roles.placement == "inline" else 3)

        async def started(what: str, link: RoleLink) -> None:
            async with alone:
                with self._phase(f"starting {what}"):
                    await link.start()

        work = [
            started(f"{engine_name(self._settings)} engine", self._rollouter),
            started(f"{learner_name(self._settings)} learner", self._learner),
        ]
        if self._teachers is not None:
            work.append(started("teachers", self._teachers))
        await asyncio.gather(*work)
        return self._rollouter.engine, self._learner.num_parameters

    async def run(self) -> AsyncState:
        """Train until the last step.

        Raises:
            StopRequestedError: A signal arrived; the state of the last finished step is saved.
            Exception: The error that ended a role for good, with its traceback.
        """
        work = [self._learn(), self._rollouts.feed(), self._rollouts.gather(), self._weights.run(), self._hear_stop()]
        if self._teachers is not None:
            work.append(self._teachers.serve())
        if self._settings.roles.placement != "inline":
            asking = ask_roles(
                self._parts.roles,
                is_started=lambda name: self._links[name].is_started,
                deadline_s=self._settings.roles.heartbeat_deadline_s,
                say=self._say,
                progress=self._parts.progress,
            )
            work.append(asking)
        tasks = [asyncio.create_task(loop) for loop in work]
        learning = tasks[0]
        try:
            await asyncio.wait([*tasks, self._validator.failed], return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._validator.failed, *tasks[1:]):
                if ended.done():
                    ended.result()  # these end only with an error
            await learning
            return self.state
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._validator.cancel()

    async def answer(self, request: Mapping[str, Any]) -> Any:
        """Answer a request to the live run; see `answer_request`."""
        return await answer_request(self._parts, self._learner, self._rollouter, request)

    async def save_stopped(self) -> None:
        """Write a checkpoint of the last step, unless it exists."""
        with suppress(RoleRestartedError):  # it is at a checkpoint
            if self._scheduler.unsaved:
                await self._checkpoints.begin(self.state)
            await self._checkpoints.wait()
        if self._rollouter.is_started:
            self._log_events(await self._rollouter.last_events())

    def _log_events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self._say(event.pop("event"), **{"step": self.state.step, **event})

    # -- the learner's side

    async def _learn(self) -> None:
        await self._begin()
        self._metrics.step_ended()  # excludes the start from the first step's time
        while True:
            try:
                await self._validate_again()
                if self._scheduler.is_done or self._ends_early:
                    await self._finish()
                    return
                with self._metrics.waiting(), self._rollouts.waiting():
                    uids = await self._next_groups()
                await self._step(uids)
            except RoleRestartedError:
                continue  # the scheduler was set back to the learner's checkpoint

    async def _begin(self) -> None:
        """Send the current weights to the engines, and evaluate the untrained policy if requested."""
        while True:
            try:
                with self._phase("sending the policy to the engines", is_brief=True):
                    await self._weights.pack_and_wait(self._scheduler.learner_version)
                await self._validate_at_start()
                break
            except RoleRestartedError:
                continue
        await self._rollouts.let_feed()

    async def _validate_at_start(self) -> None:
        step = self.state.step
        if step == 0 and self._settings.trainer.validate_first and self.state.validated < 0:
            self._trackers.log(0, await self._validate("validation", "test"))
        elif self._lacks_validation:
            self._trackers.log_late(step, await self._validate("validation"))

    async def _validate_again(self) -> None:
        """Restart a validation that a dead learner abandoned, unless its step is trained again."""
        was_restored, self._was_restored = self._was_restored, False
        if was_restored and self._lacks_validation and self._settings.schedule.validate_on == "learner":
            await self._validate_beside()

    @property
    def _lacks_validation(self) -> bool:
        """True if the last step's validation was due and is not finished."""
        state = self.state
        is_due = self._validator.has_problems and self._is_due(self._settings.trainer.validate_every)
        return 0 < state.step > state.validated and is_due

    async def _next_groups(self) -> tuple[str, ...]:
        """Wait for the groups of the next step."""
        async with self._changed:
            while True:
                self._parts.stop.check()
                for uid in self._scheduler.stale():
                    await asyncio.to_thread(self._parts.queue.drop, uid, reason="stale", reissue=True)
                    self._scheduler.reissued(uid)
                    self._metrics.dropped("stale")
                    self._changed.notify_all()
                uids = self._scheduler.next_step()
                if uids is not None and not self._weights.is_live:
                    return uids
                if self._scheduler.is_without_groups:
                    raise RolloutError(
                        f"all groups of step {self.state.step + 1} failed; the last: {self._rollouts.last_failure}"
                    )
                await self._changed.wait()

    async def _step(self, uids: tuple[str, ...]) -> None:
        """Train a step, then publish, log and checkpoint it as due."""
        scheduler, number = self._scheduler, self._scheduler.num_steps + 1
        async with self._in_step:
            with self._phase(f"training step {number}", is_brief=True):
                report = await self._train(number, uids)
            wall_s = self._note(report)
            publishing = asyncio.create_task(self._publish_step())
            try:
                metrics, histograms = await self._measure(report, uids, wall_s)
            except BaseException:
                publishing.cancel()
                raise
        try:
            metrics |= await publishing
        finally:
            self._trackers.log_histograms(number, histograms)
            self._trackers.log(number, metrics)  # even if the run stops during validation
            self._parts.lifecycle.rollouts.write(report.rollouts)
        if self._lacks_validation:
            await self._validate_beside()
        is_due = scheduler.is_done or self._is_due(self._settings.trainer.checkpoint_every)
        if is_due or self._goal.needs_checkpoint(number):
            await self._checkpoints.begin(self.state)
        await self._checkpoints.confirm()

    async def _train(self, number: int, uids: tuple[str, ...]) -> TrainedStep:
        """Let the learner train a step."""
        is_current = self._learner.course()
        self._parts.record.write("step", step=number, uids=list(uids))
        order = StepOrder(
            step=number,
            uids=uids,
            version=self._scheduler.learner_version,
            kl=self.state.kl,
            deadline_s=self._settings.rollout.deadline_s,
        )
        report = await self._learner.when(is_current).train(order)
        self._parts.progress(f"step {number}")
        async with self._changed:
            if not is_current():
                raise RoleRestartedError(f"the learner died after step {number}.")
            self._scheduler.trained(uids)
            self._changed.notify_all()
        return report

    def _note(self, report: TrainedStep) -> float:
        """Record a finished step; return the seconds since the previous one."""
        scheduler, state = self._scheduler, self.state
        wall_s = self._metrics.step_ended()
        self.state = replace(
            state,
            step=scheduler.num_steps,
            policy_version=scheduler.options.version_after(scheduler.num_steps),
            num_trained=scheduler.num_trained,
            num_spent=scheduler.num_spent,
            num_samples=state.num_samples + report.num_trajectories,
            steps_wall_s=state.steps_wall_s + wall_s,
            kl=dict(report.kl),
        )
        return wall_s

    async def _measure(
        self, report: TrainedStep, uids: tuple[str, ...], wall_s: float
    ) -> tuple[dict[str, float], dict[str, Histogram]]:
        """Metrics and histograms of a finished step."""
        scheduler = self._scheduler
        window = await self._rollouter.window(scheduler.num_steps)
        teachers = {"metrics": {}, "events": []} if self._teachers is None else await self._teachers.window()
        self._parts.lifecycle.rollouts.hold(window["rollouts"])
        self._log_events([*window["events"], *teachers["events"]])
        metrics = self._metrics.of_step(
            report,
            {**window["metrics"], **teachers["metrics"]},
            wall_s=wall_s,
            scheduler=scheduler,
            stats=await asyncio.to_thread(self._parts.queue.stats),
            restarts={name: link.num_restarts for name, link in self._links.items()},
        )
        metrics |= {"training/epoch": float(self._parts.supply.epoch), **self._parts.memory.step(scheduler.num_steps)}
        if self._settings.rollout_cache.enabled:
            metrics["rollout/replayed"] = len(scheduler.replayed.intersection(uids)) / len(uids)
        contents = window["histograms"] | report.histograms
        is_due = self._settings.metrics.has_details(scheduler.num_steps)
        return metrics, {name: Histogram.from_json(contents[name]) for name in contents if is_due}

    async def _publish_step(self) -> dict[str, float]:
        """Publish after the last step of a version; wait for it, and validate, if the next step needs that."""
        scheduler, every = self._scheduler, self._settings.schedule.sync_every
        is_last = scheduler.is_done
        version = scheduler.options.version_after(scheduler.num_steps)
        if (scheduler.num_steps % every == 0 or is_last) and version >= scheduler.served_version:
            if is_last or self._settings.schedule_options.is_on_policy:
                if self._holds_versions:
                    await self._validator.wait()
                self._rollouts.hold()
                await self._weights.pack_and_wait(version)
                is_due = is_last or self._is_due(self._settings.trainer.validate_every)
                splits = ("validation", "test") if is_last else ("validation",)
                metrics = await self._validate(*splits) if is_due else {}
                await self._rollouts.let_feed()
                return metrics
            if self._holds_versions:
                self._has_held = True
            else:
                await self._weights.pack(version)
        return {}

    async def _finish(self) -> None:
        """Wait for background work and for the last checkpoint."""
        await self._validator.wait()
        if not self._scheduler.is_done:
            self._rollouts.hold()
            await self._weights.wait_served()
            step = self.state.step
            splits = ("test",) if self.state.validated >= step else ("validation", "test")
            self._trackers.log_late(step, await self._validate(*splits))
        self._log_events(await self._rollouter.last_events())
        await self._checkpoints.begin(self.state)
        await self._checkpoints.wait()

    @property
    def _ends_early(self) -> bool:
        """True if validation ended the run and the engines have, or soon will have, the weights of the last step."""
        is_published = self._scheduler.num_steps % self._settings.schedule.sync_every == 0
        return is_published and self.state.step > 0 and self._goal.stop_reason is not None

    async def _validate(self, *splits: str) -> dict[str, float]:
        """Evaluate the current policy while training waits."""
        step = self.state.step
        await self._hold_weights(step)
        with self._phase(f"validating step {step}", is_brief=True):
            metrics = await self._validator.run(step, splits=splits)
        self._note_validation(step, metrics)
        return metrics

    async def _validate_beside(self) -> None:
        """Start evaluating the current policy while training continues."""
        await self._validator.wait()  # one at a time, because each may hold a copy of the weights
        await self._hold_weights(self.state.step)
        if self._settings.trainer.keep_best and self._validator.can_be_exact(self.state.step):
            self._goal.begun(self.state.step)
            self._holds_versions = self._settings.schedule.validate_on == "engines"
        self._validator.begin(self.state.step, self._has_validated, until_ready=self._weights.wait_served)

    async def _hold_weights(self, step: int) -> None:
        if self._settings.schedule.validate_on == "learner":
            version = self._scheduler.options.version_after(step)
            await self._learner.hold(step, version, self._learner.course())

    async def _has_validated(self, step: int, metrics: dict[str, float]) -> None:
        """A background validation has finished; the newest weights are published if it held them back."""
        self._note_validation(step, metrics)
        self._trackers.log_late(step, metrics)
        self._parts.progress(f"validation of step {step}")
        async with self._changed:
            was_held = self._holds_versions and self._has_held
            self._holds_versions = self._has_held = False
            if was_held:
                self._weights.lost()

    def _note_validation(self, step: int, metrics: dict[str, float]) -> None:
        self._goal.noted(step, metrics)
        self.state = self._validator.noted(self.state, step, metrics)

    # -- weights

    async def _is_served(self, packed: PackedWeights, report: PublishReport) -> None:
        """The engines serve new weights."""
        version = packed.update.version
        await asyncio.to_thread(self._parts.queue.set_policy_version, version)
        self._parts.record.write("published", version=version, step=packed.step, fingerprint=report.fingerprint)
        self._metrics.published(packed, report)
        self._parts.progress(f"policy version {version}")
        async with self._changed:
            self._scheduler.published(version)
            self._changed.notify_all()

    # -- deaths

    async def _is_lost(self, role: str, error: RLError) -> None:
        self._say("role_died", role=role, error=str(error))

    async def _learner_is_restored(self, checkpoint: Path | None) -> None:
        """Roll everything back to the learner's checkpoint; later steps are trained again with the same groups."""
        state = AsyncState() if checkpoint is None else read_run_state(checkpoint, AsyncState)
        await self._checkpoints.ack(self._scheduler.saved(state.step))
        results = dict(state.results) | dict(self.state.results)
        async with self._changed:
            self._scheduler.rewind()
            self._learner.went_back()
            self._goal.went_back()
            self.state = replace(state, results=results, validated=max(state.validated, self.state.validated))
            self._changed.notify_all()
        if self._scheduler.num_steps != state.step:
            raise CheckpointError(
                f"the learner died, and its newest complete checkpoint is of step {state.step}, but the queue has "
                f"acked the groups up to step {self._scheduler.num_steps}. Restore that step's checkpoint."
            )
        self._was_restored = True
        self._parts.record.write("resumed", step=state.step)
        self._say("learner_restored", step=state.step, checkpoint=None if checkpoint is None else str(checkpoint))

    # -- the user

    async def _hear_stop(self) -> None:
        """Stop the run on request, but never mid-step, so that checkpoints hold complete steps.

        Raises:
            StopRequestedError: The user requested it.
        """
        await self._parts.stop.wait()
        async with self._in_step:
            raise StopRequestedError

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0
