"""One launch of an asynchronous run: restore its state, start the roles, train, and leave a resumable folder."""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rl_async_trainer.controller.controller import Controller
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.liveness.control_socket import control_socket
from rl_async_trainer.liveness.role_activity import collect_evidence
from rl_async_trainer.liveness.watchdog import Watchdog
from rl_async_trainer.record import AsyncState, ScheduleRecord, read_history
from rl_async_trainer.restoring import PromptPlaces, issue_replayed, read_plan, restore_places, restore_schedule
from rl_async_trainer.settings import AsyncSettings
from rl_core import InProcessQueue, SharedMemoryQueue, TransferQueue
from rl_core.cluster import ClusterOptions, RayOptions, RestartPolicy, Role, RoleSpec, open_cluster, start_ray
from rl_core.errors import HangError, NotReadyError
from rl_core.queue import QueueOptions, RayQueue
from rl_metrics.hang import HANG_FILE, HangReport
from rl_metrics.trackers import ConsoleTracker
from rl_rollout.prompts import PromptSource, PromptSupply
from rl_rollout.schedule import Scheduler
from rl_trainer_parts.learning.start_learners import describe_parameters
from rl_trainer_parts.reporting.step_metrics import make_memory_watch
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.rollouts.setup import canary_prompts, queue_tasks
from rl_trainer_parts.rollouts.skip_cache import with_absolute_cache
from rl_trainer_parts.run.folder import RunFolder, read_run_state
from rl_trainer_parts.run.lifecycle import RunLifecycle
from rl_trainer_parts.run.stopping import StopRequestedError, StopSignal

QUEUE = "queue"
ROLE_NAMES = {"rollouter": "rollouter", "learner": "learner host", "teachers": "teachers"}
FACTORIES = {
    "rollouter": "rl_async_trainer.roles.rollouter:RunRollouter",
    "learner": "rl_async_trainer.roles.learner:RunLearner",
    "teachers": "rl_async_trainer.roles.teachers:RunTeachers",
}
"""Class of each role as "module:class"; a replacement has the methods of the class it replaces."""


def open_queue(settings: AsyncSettings, folder: Path) -> TransferQueue:
    """The run's queue; its journal is in the run's folder, so its contents survive every process.

    Raises:
        JournalError: The journal cannot be used.
    """
    options = QueueOptions(directory=folder / QUEUE)
    tasks = queue_tasks(settings, order="arrival")
    if settings.roles.placement == "inline":
        return InProcessQueue(tasks, options=options)
    if settings.roles.placement == "process":
        return SharedMemoryQueue(tasks, options=options)
    start_ray(RayOptions(address=settings.cluster.ray_address))
    return RayQueue(tasks, options=options)


class AsyncTrainingRun:
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
        self._hung: asyncio.Future[None]
        self._deaf: Collection[str] = ()
        self._roles: dict[str, Role] = {}
        self._controller: Controller | None = None
        self._lifecycle = RunLifecycle(settings, folder, console, inputs.tokenizer)

    async def run(self) -> int:
        """Train until the last step or a signal; return the exit status. See `RunLifecycle.launch`."""
        self._hung = asyncio.get_running_loop().create_future()
        return await self._lifecycle.launch(
            self._train, lambda: self._state if self._controller is None else self._controller.state
        )

    async def _train(self, stack: AsyncExitStack, stop: StopSignal) -> None:
        settings, console = self._settings, self._console
        await stack.enter_async_context(control_socket(self._folder.path, self._answer))
        checkpoint = self._lifecycle.find_checkpoint()
        if checkpoint is not None:
            self._state = read_run_state(checkpoint, AsyncState)
            self._lifecycle.resumes(checkpoint, self._state)
            if self._state.validated >= self._state.step and self._lifecycle.says_done(self._state):
                return
        with console.phase("opening the queue", is_brief=True):
            queue = open_queue(settings, self._folder.path)
        stack.callback(queue.close)
        parts, watchdog = await self._assemble(stack, stop, queue)
        controller = Controller(parts, self._state)
        engine, num_parameters = await stop.run(
            controller.start(),
            what="engines and learner to start",
            deadline_s=settings.roles.start_deadline_s,
        )
        self._controller = controller
        console.say(f"engine: {engine}")
        console.say(f"learner: {describe_parameters(settings, num_parameters)}")
        self._lifecycle.begins(self._state)
        await stack.enter_async_context(watchdog)
        try:
            await self._run_unless_hung(controller)
        except StopRequestedError:
            with console.phase(f"stopping: writing a checkpoint of step {controller.state.step}"):
                await controller.save_stopped()
            raise

    async def _assemble(
        self, stack: AsyncExitStack, stop: StopSignal, queue: TransferQueue
    ) -> tuple[ControllerParts, Watchdog]:
        """Everything the controller needs, in the state of the previous launch."""
        settings, folder = self._settings, self._folder.path
        supply = PromptSupply(PromptSource(self._inputs.train, seed=settings.run.seed))
        scheduler, places = self._restored(queue, supply)
        record = ScheduleRecord(folder)
        stack.callback(record.close)
        record.write("resumed", step=self._state.step)
        await self._start_roles(stack, queue)
        watchdog = Watchdog(
            settings.roles.hang_deadline_s,
            collect=partial(collect_evidence, self._roles, queue, scheduler, folder=folder),
            path=folder / HANG_FILE,
            on_hang=partial(self._has_hung, asyncio.get_running_loop()),
        )
        parts = ControllerParts(
            settings=settings,
            inputs=self._inputs,
            roles=self._roles,
            queue=queue,
            scheduler=scheduler,
            supply=supply,
            places=places,
            record=record,
            stop=stop,
            progress=watchdog.progress,
            lifecycle=self._lifecycle,
            memory=make_memory_watch(settings, "controller", say=self._lifecycle.say),
        )
        return parts, watchdog

    def _restored(self, queue: TransferQueue, supply: PromptSupply) -> tuple[Scheduler, PromptPlaces]:
        """The schedule and the prompts' places, as the previous launch or the recorded run left them."""
        options, history = self._settings.schedule_options, read_history(self._folder.path)
        plan = None if self._replayed is None else read_plan(self._replayed, options)
        scheduler = restore_schedule(options, self._state, queue, supply, history, plan=plan)
        if plan is None:
            return scheduler, restore_places(options, queue.ledger(), history)
        issue_replayed(plan, scheduler, queue, supply, group_size=self._settings.rollout.group_size)
        return scheduler, PromptPlaces(plan.places)

    async def _start_roles(self, stack: AsyncExitStack, queue: TransferQueue) -> None:
        """Start the processes of rollouter, learner and, if there are any, teachers; their models load later."""
        settings, roles, folder = self._settings, self._settings.roles, self._folder.path
        digest, canary = self._inputs.train.fingerprint, canary_prompts(settings, self._inputs.train)
        own: dict[str, tuple[int, dict[str, Any]]] = {
            "rollouter": (roles.rollouter_restarts, {"log_directory": folder / "logs", "prompts_digest": digest}),
            "learner": (roles.learner_restarts, {"canary": canary, "folder": folder}),
        }
        if settings.distillation.teachers:
            own["teachers"] = roles.teacher_restarts, {"folder": folder}
        common = {"settings": with_absolute_cache(settings), "queue": queue}
        options = ClusterOptions(
            kind=roles.placement,
            ray=RayOptions(address=settings.cluster.ray_address),
            log_directory=folder / "logs",
            close_deadline_s=60.0,
        )
        with self._console.phase(f"starting roles ({roles.placement})"):
            cluster = open_cluster(options)
            stack.push_async_callback(cluster.close)
            specs = [
                RoleSpec(
                    name=ROLE_NAMES[role],
                    factory=self._factories[role],
                    kwargs={**kwargs, **common},
                    restart=RestartPolicy(max_restarts=max_restarts, backoff_s=0.2),
                )
                for role, (max_restarts, kwargs) in own.items()
            ]
            starting = (cluster.start(spec, deadline_s=roles.start_deadline_s) for spec in specs)
            self._roles = dict(zip(own, await asyncio.gather(*starting), strict=True))

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        """Answer a request to the run; while it starts or ends, only its status."""
        lifecycle = self._lifecycle
        if self._controller is not None and not lifecycle.is_ending:
            return await self._controller.answer(request)
        stage, running = "ending" if lifecycle.is_ending else "starting", lifecycle.console.running()
        if request.get("do") != "status":
            raise NotReadyError(f"the run is {stage} ({'; '.join(running)}). Try again while it trains.")
        return {"stage": stage, "launch_s": lifecycle.launch_s, "running": running}

    async def _run_unless_hung(self, controller: Controller) -> None:
        running = asyncio.create_task(controller.run())
        both: set[asyncio.Future[Any]] = {running, self._hung}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
            for name in self._roles.keys() & self._deaf:  # they would not answer a request to close either
                await self._roles[name].end("did not answer when the run hung")
            self._hung.result()
        self._hung.cancel()
        running.result()

    def _has_hung(self, loop: asyncio.AbstractEventLoop, report: HangReport) -> None:
        """Report the hang, and stop the run if the settings ask for it; called from the detecting thread."""
        file = self._folder.path / HANG_FILE
        self._lifecycle.say("run_hung", summary=report.summary, file=str(file), no_progress_s=report.no_progress_s)
        self._console.say(f"{report.summary}. See {file}.", style="bold red")
        if self._settings.roles.on_hang == "fail":
            deaf = [role.name for role in report.roles if not role.is_answering]
            loop.call_soon_threadsafe(self._end_hung, f"{report.summary}. The roles' stacks are in {file}.", deaf)

    def _end_hung(self, message: str, deaf: Collection[str]) -> None:
        if not self._hung.done():
            self._deaf = deaf
            self._hung.set_exception(HangError(message))
