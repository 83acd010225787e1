"""One launch of an asynchronous run: restore its state, start the roles, train, and leave a resumable folder."""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rl_async_trainer.assemble import FACTORIES, Roles, open_queue, start_roles
from rl_async_trainer.controller.controller import Controller
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.controller.validator import Validator
from rl_async_trainer.liveness.control_socket import ControlSocket
from rl_async_trainer.liveness.hang_evidence import HangEvidence
from rl_async_trainer.liveness.live_answers import answer_meanwhile
from rl_async_trainer.liveness.watchdog import Watchdog
from rl_async_trainer.schedule.places import Places
from rl_async_trainer.schedule.record import ScheduleRecord, read_history
from rl_async_trainer.schedule.replay import issue_replayed, read_plan
from rl_async_trainer.schedule.restoring import restore_places, restore_schedule
from rl_async_trainer.schedule.run_state import AsyncState
from rl_async_trainer.settings import AsyncSettings
from rl_core import TransferQueue
from rl_core.errors import HangError
from rl_metrics.hang import HANG_FILE, HangReport
from rl_metrics.trackers import ConsoleTracker
from rl_rollout.prompts import PromptSource, PromptSupply
from rl_trainer_parts.learning.parts import canary_sequences
from rl_trainer_parts.learning.start_learners import describe_parameters
from rl_trainer_parts.reporting.rollout_rows import RolloutWriter
from rl_trainer_parts.reporting.step_metrics import make_memory_watch
from rl_trainer_parts.reporting.token_probes import TokenProbes
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.run.checkpoints import read_run_state
from rl_trainer_parts.run.folder import RunFolder
from rl_trainer_parts.run.lifecycle import RunLifecycle
from rl_trainer_parts.run.stopping import StopRequestedError, StopSignal


class TrainingRun:
    """One launch of a run, in a folder that this process has locked."""

    def __init__(
        self,
        settings: AsyncSettings,
        inputs: Inputs,
        folder: RunFolder,
        console: ConsoleTracker,
        *,
        factories: Mapping[str, str] | None = None,
        replayed: Path | None = None,
    ) -> None:
        """Set the parameters; models load in `run`.

        Args:
            settings: The run's settings.
            inputs: The run's inputs.
            folder: The run's folder, locked by this process.
            console: Shows progress.
            factories: Roles that replace those in `FACTORIES`.
            replayed: Folder of the recorded run to replay.
        """
        self._replayed = replayed
        self._factories = {**FACTORIES, **(factories or {})}
        self._settings = settings
        self._inputs = inputs
        self._folder = folder
        self._console = console
        self._state = AsyncState()
        self._watchdog: Watchdog
        self._hung: asyncio.Future[None]
        self._deaf: Collection[str] = ()
        self._roles: Roles | None = None
        self._controller: Controller | None = None
        self._lifecycle = RunLifecycle(settings, folder, console)
        self._say = self._lifecycle.say

    async def run(self) -> int:
        """Train until the last step or a signal; return the exit status. See `RunLifecycle.launch`."""
        self._hung = asyncio.get_running_loop().create_future()
        return await self._lifecycle.launch(self._train, lambda: self._now)

    @property
    def _now(self) -> AsyncState:
        return self._state if self._controller is None else self._controller.state

    async def _train(self, stack: AsyncExitStack, stop: StopSignal) -> None:
        settings, console = self._settings, self._console
        await stack.enter_async_context(ControlSocket(self._folder.path, self._answer))
        checkpoint = self._lifecycle.find_checkpoint()
        if checkpoint is not None:
            self._state = read_run_state(checkpoint, AsyncState)
            self._lifecycle.resumes(checkpoint, self._state)
            if self._state.validated >= self._state.step and self._lifecycle.says_done(self._state):
                return
        with console.phase("opening the queue", is_brief=True):
            queue = open_queue(settings, self._folder.path)
        stack.callback(queue.close)
        parts = await self._controls(stack, stop, queue)
        controller = Controller(parts, self._state)
        engine, num_parameters = await stop.run(
            controller.start(checkpoint),
            what="engines and learner to start",
            deadline_s=settings.roles.start_deadline_s,
        )
        self._controller = controller
        console.say(f"engine: {engine}")
        console.say(f"learner: {describe_parameters(settings, num_parameters)}")
        self._lifecycle.begins(self._state)
        await stack.enter_async_context(self._watchdog)
        try:
            await self._run_unless_hung(controller)
        except StopRequestedError:
            with console.phase(f"stopping: writing a checkpoint of step {controller.state.step}"):
                await controller.save_stopped()
            raise

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        """Answer a request to the run; while it starts or ends, only its status."""
        if self._controller is not None and not self._lifecycle.is_ending:
            return await self._controller.answer(request)
        return answer_meanwhile(request, self._lifecycle)

    async def _run_unless_hung(self, controller: Controller) -> None:
        running = asyncio.create_task(controller.run())
        both: set[asyncio.Future[Any]] = {running, self._hung}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
            await self._end_deaf()
            self._hung.result()
        self._hung.cancel()
        running.result()

    async def _controls(self, stack: AsyncExitStack, stop: StopSignal, queue: TransferQueue) -> ControllerParts:
        """Everything the controller needs, in the state of the previous launch."""
        settings, folder = self._settings, self._folder.path
        history = read_history(folder)
        plan = None if self._replayed is None else read_plan(self._replayed, settings.schedule_options)
        record = ScheduleRecord(folder)
        stack.callback(record.close)
        supply = PromptSupply(PromptSource(self._inputs.train, seed=settings.run.seed))
        scheduler = restore_schedule(settings.schedule_options, self._state, queue, supply, history, plan=plan)
        places = (
            restore_places(settings.schedule_options, queue.ledger(), history) if plan is None else Places(plan.places)
        )
        if plan is not None:
            issue_replayed(plan, scheduler, queue, supply, group_size=settings.rollout.group_size)
        record.write("resumed", step=self._state.step)
        roles = self._roles = await self._start_roles(stack, queue)
        validator = Validator(
            settings,
            self._inputs,
            say=self._say,
            on_generations=self._lifecycle.trackers.log_generations,
            progress=lambda what: self._watchdog.progress(what),
            probes=TokenProbes.of_run(settings, folder, self._inputs.tokenizer),
        )
        rollouts = RolloutWriter(folder / "rollouts.jsonl", self._inputs.tokenizer)
        stack.callback(rollouts.close)
        evidence = HangEvidence(roles, queue, scheduler, folder=folder)
        self._watchdog = Watchdog(
            settings.roles.hang_deadline_s,
            collect=evidence.collect,
            path=folder / HANG_FILE,
            on_hang=partial(self._has_hung, asyncio.get_running_loop()),
        )
        return ControllerParts(
            settings=settings,
            roles=roles,
            queue=queue,
            scheduler=scheduler,
            supply=supply,
            places=places,
            record=record,
            validator=validator,
            evidence=evidence,
            stop=stop,
            progress=self._watchdog.progress,
            say=self._say,
            lifecycle=self._lifecycle,
            rollouts=rollouts,
            memory=make_memory_watch(settings, "controller", say=self._say),
        )

    async def _start_roles(self, stack: AsyncExitStack, queue: TransferQueue) -> Roles:
        settings = self._settings
        with self._console.phase(f"starting roles ({settings.roles.placement})"):
            roles = await start_roles(
                settings,
                queue,
                folder=self._folder.path,
                canary_sequences=canary_sequences(settings, self._inputs.train),
                prompts_digest=self._inputs.train.fingerprint,
                factories=self._factories,
            )
        stack.push_async_callback(roles.cluster.close)
        return roles

    def _has_hung(self, loop: asyncio.AbstractEventLoop, report: HangReport) -> None:
        """Report the hang, and stop the run if the settings ask for it; called from the detecting thread."""
        file = self._folder.path / HANG_FILE
        self._say("run_hung", summary=report.summary, file=str(file), no_progress_s=report.no_progress_s)
        self._console.say(f"{report.summary}. See {file}.", style="bold red")
        if self._settings.roles.on_hang == "fail":
            deaf = [role.name for role in report.roles if not role.is_answering]
            loop.call_soon_threadsafe(self._end_hung, f"{report.summary}. The roles' stacks are in {file}.", deaf)

    def _end_hung(self, said: str, deaf: Collection[str]) -> None:
        if not self._hung.done():
            self._deaf = deaf
            self._hung.set_exception(HangError(said))

    async def _end_deaf(self) -> None:
        """Kill the roles that did not answer, because they would not answer a request to close either."""
        roles = {} if self._roles is None else self._roles.all
        for name, role in roles.items():
            if name in self._deaf:
                await role.end("did not answer when the run hung")
