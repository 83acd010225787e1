"""The caller's side of a role in a Ray actor."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rl_core.cluster.calls import STACKS, RoleCall
from rl_core.cluster.messages import named
from rl_core.cluster.options import ClusterOptions
from rl_core.cluster.processes.guard import ProcessFamily, end_family, is_running
from rl_core.cluster.processes.output import log_path, quote
from rl_core.cluster.processes.packing import Packed
from rl_core.cluster.processes.stack_dump import dump_of
from rl_core.cluster.ray.actor import QUESTIONS, ActorHello, RoleActor, is_seen_here, read_printed, to_wire
from rl_core.cluster.ray.pools import RayReserver, free_pools_of, ray_nodes
from rl_core.cluster.remote import RemoteProcess, role_environment
from rl_core.cluster.role_process import LaunchRequest
from rl_core.cluster.role_spec import RoleSpec
from rl_core.errors import RoleError
from rl_core.files.durable import current_umask

MAX_WAITING = 100_000
"""Maximum number of concurrent calls in an actor."""
GONE_S = 5.0
SUSPECTED_S = 3.0
"""Maximum wait for Ray to report the death of an unreachable actor; with its last lines, less than 5 s in total."""
LAST_LINES_S = 2.0


class ActorProcess(RemoteProcess):
    """A role whose object lives in a Ray actor."""

    def __init__(self, request: LaunchRequest, options: ClusterOptions) -> None:
        """Request the actor; `start` waits for the object."""
        super().__init__(request, options)
        self._num_frames = 0
        self._is_suspected = False
        self._is_reported = False
        self._end_text = ""
        self._hello: ActorHello | None = None
        self._is_here = False
        self._actor = make_actor(request, options, self._mark)
        self._actor.lives.remote().future().add_done_callback(self._has_died)

    @property
    def lost_its_node(self) -> bool:
        """True if it ended before it began, because Ray had not yet noticed the loss of its node."""
        return self._hello is None and "its node has died" in self._end_text

    @property
    def pid(self) -> int:
        """See `RoleProcess.pid`."""
        return 0 if self._hello is None else self._hello.pid

    async def _make(self, spec: RoleSpec) -> None:
        self._hello = await self._ask("", self._actor.hello.remote())
        self._is_here = self._hello.node == ray.get_runtime_context().get_node_id()
        context = replace(self._request.context, address=self._hello.address)
        await self.call("", to_wire(RoleCall([spec], "", (spec, context), {}).pack()))

    async def _describe_delay(self) -> str:
        late = f"{self._spec} was not ready after {self._request.deadline_s:g} s and was ended; "
        if self._hello is None:
            free = await asyncio.to_thread(RayReserver().describe_free)
            return f"{late}Ray had no resources or no process for its actor: {free}."
        output = await asyncio.to_thread(self._output)
        return (
            f"{late}{self._spec.factory} was still running in pid {self._hello.pid} on {self._hello.address}. Raise "
            f"the deadline. {output}"
        )

    async def _ask(self, method: str, answer: Any) -> Any:
        """Await an actor's reply to a request other than a call, tracked like a call."""
        number, future = self._calls.begin(method)
        answer.future().add_done_callback(self._settler(number, None))
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.forget(number)

    async def _ask_stacks(self) -> str:
        return str(await self._ask(STACKS, self._actor.stacks.remote()))

    async def _dump(self, deadline_s: float) -> str:
        hello = self._hello
        if hello is None:
            return "Its location is not known yet."
        if self._is_here:
            return await asyncio.to_thread(dump_of, hello.pid, self._mark, deadline_s=deadline_s)
        return await asyncio.to_thread(dump_there, hello, self._mark, deadline_s)

    def _send(self, calls: list[tuple[int, Any]]) -> None:
        frame, self._num_frames = self._num_frames, self._num_frames + 1
        parcels = [parcel for _, parcel in calls]
        for index, (number, _) in enumerate(calls):
            is_first = index == 0
            answer = self._actor.run.remote(frame, index, *(parcels if is_first else ()))
            answer.future().add_done_callback(self._settler(number, frame if is_first else None))

    def _settler(self, number: int, frame: int | None) -> Callable[["Future[Any]"], None]:
        """Return the callback for a reply from Ray; it runs in one of Ray's threads and must not block."""

        def settle(answer: "Future[Any]") -> None:
            error = answer.exception()
            if error is None:
                self._calls.settle(number, Packed(*answer.result()))
                return
            lost = named(RoleError(f"a call of {self._spec} was lost: {_shorten(error)}"), self._spec)
            if isinstance(error, ray.exceptions.RayActorError):
                self._suspect(error)  # its calls fail once its end is confirmed
                return
            if frame is not None:
                self._actor.skip.remote(frame)
            self._calls.fail(number, lost)

        return settle

    def _suspect(self, error: BaseException) -> None:
        """Handle an unreachable actor: wait briefly for Ray to report its death, then treat it as dead."""
        with self._lock:
            is_first, self._is_suspected = not self._is_suspected, True
        if is_first:
            timer = threading.Timer(SUSPECTED_S, self._report, (error,))
            timer.daemon = True
            timer.start()

    async def _close_object(self) -> None:
        if not self._ended.done() and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):  # it died meanwhile
                await asyncio.wrap_future(self._actor.end.remote().future())

    async def _end(self) -> None:
        self._kill()
        if not ray.is_initialized():  # Ray reports no death any more
            await asyncio.to_thread(self._report, RoleError("Ray was shut down before the role was closed."))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                await asyncio.wrap_future(self._ended)
        if self._is_here:
            await asyncio.to_thread(self._end_here)

    def _kill(self) -> None:
        with contextlib.suppress(Exception):
            if ray.is_initialized():  # otherwise `ray.kill` may start another Ray
                ray.kill(self._actor)

    def _end_here(self) -> None:
        ends_at = time.monotonic() + GONE_S
        while is_running(self.pid) and time.monotonic() < ends_at:
            time.sleep(0.01)
        end_family(ProcessFamily(self._mark))

    def _has_died(self, lived: "Future[Any]") -> None:
        """Handle the death that Ray reports; runs in one of Ray's threads and must not block."""
        threading.Thread(target=self._report, args=(lived.exception(),), name=f"end {self._spec}", daemon=True).start()

    def _report(self, error: BaseException) -> None:
        with self._lock:
            if self._is_reported:
                return
            self._is_reported = True
        self._kill()  # if Ray cannot reach it, no caller can either
        free_pools_of(self._mark)
        output = "" if self._because is not None else self._output()
        self._end_text = f"{output} Ray says: {_shorten(error)}"
        self._report_end()

    def _describe_end(self) -> tuple[str, str]:
        where = "" if self._hello is None else f" (pid {self._hello.pid} on {self._hello.address})"
        return f"the actor of {self._spec}{where} ended", self._end_text

    def _output(self) -> str:
        """Return its last lines, read on its node."""
        hello = self._hello
        if hello is None:
            return "It printed nothing."
        if is_seen_here(hello.printed):
            return quote(read_printed(hello.printed))
        if hello.node not in {node["NodeID"] for node in ray_nodes() if node["Alive"]}:
            return "Its output was on its node, which is gone."
        try:
            return quote(read_there(hello, LAST_LINES_S))
        except ray.exceptions.RayError as error:
            return f"Its output is on {hello.address}, which does not answer: {type(error).__name__}."


def make_actor(request: LaunchRequest, options: ClusterOptions, mark: str) -> Any:
    """Request an actor from Ray, without waiting."""
    spec, slot = request.spec, request.slot
    log = None if options.log_directory is None else str(log_path(options.log_directory.absolute(), spec))
    wanted: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
    if slot is not None:
        wanted = {"num_cpus": slot.taken.cpus, "num_gpus": sum(slot.taken.gpus.values())}
        wanted["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            slot.request, placement_group_bundle_index=slot.index
        )
    remote: Any = ray.remote
    actor = remote(concurrency_groups={QUESTIONS: 1})(RoleActor)
    return actor.options(
        max_concurrency=MAX_WAITING,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": role_environment(spec, mark)},
        **wanted,
    ).remote(str(spec), request.context.incarnation, mark, log, current_umask())


def store(packed: Packed) -> Any:
    """Put a call for several actors into Ray's object store."""
    return ray.put(to_wire(packed))


def read_there(hello: ActorHello, deadline_s: float) -> str:
    """Read an actor's last lines on its node.

    Raises:
        ray.exceptions.RayError: The node did not answer in time.
    """
    there = NodeAffinitySchedulingStrategy(hello.node, soft=False)
    reading = ray.remote(read_printed).options(num_cpus=0, scheduling_strategy=there).remote(hello.printed)
    return str(ray.get(reading, timeout=deadline_s))


def dump_there(hello: ActorHello, mark: str, deadline_s: float) -> str:
    """Return an actor's stacks, dumped by a signal from its node, or the reason why they are missing."""
    there = NodeAffinitySchedulingStrategy(hello.node, soft=False)
    remote: Any = ray.remote
    try:
        asking = remote(dump_of).options(num_cpus=0, scheduling_strategy=there)
        return str(ray.get(asking.remote(hello.pid, mark, deadline_s=deadline_s / 2), timeout=deadline_s))
    except ray.exceptions.RayError as error:
        return f"Its node, {hello.address}, does not answer either: {_shorten(error)}"


def _shorten(error: BaseException) -> str:
    """Shorten Ray's description of a death by removing its advice."""
    return " ".join(str(error).split()).partition(" Some common causes")[0]
