"""The caller's side of a role in an actor of Ray."""

import asyncio
import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rl_core.cluster.calls import STACKS, Call, Calls, describe_call
from rl_core.cluster.incarnation import Birth
from rl_core.cluster.messages import named
from rl_core.cluster.options import ClusterOptions, RestartPolicy
from rl_core.cluster.processes.guard import MARK_VARIABLE, Family, end_family, is_running
from rl_core.cluster.processes.output import log_path, quote
from rl_core.cluster.processes.packing import Packed
from rl_core.cluster.processes.stack_dump import ask_then_dump, dump_of
from rl_core.cluster.ray.actor import QUESTIONS, Door, Hello, RoleActor, is_seen_here, read_printed, to_wire
from rl_core.cluster.ray.pools import free_pools_of, ray_nodes, say_free
from rl_core.errors import DeadlineError, NotReadyError, RLError, RoleDiedError, RoleError

MAX_WAITING = 100_000
"""Calls that may wait in an actor at once."""
GONE_S = 5.0
SUSPECTED_S = 3.0
"""How long an actor that a call did not find may stay unsaid by Ray: with its last lines, less than 5 s."""
LAST_LINES_S = 2.0


class RayIncarnation:
    """A role whose object lives in an actor."""

    def __init__(self, birth: Birth, options: ClusterOptions) -> None:
        """Ask for the actor; `start` also waits until the object is made."""
        self._birth = birth
        self._spec = birth.spec
        self._close_deadline_s = options.close_deadline_s
        self._mark = uuid.uuid4().hex
        self._calls = Calls(self._spec)
        self._outgoing: list[tuple[int, Any]] = []
        self._num_frames = 0
        self._because: str | None = None
        self._is_closed = False
        self._watchers: list[Callable[[RLError], None]] = []
        self._lock = threading.Lock()
        self._has_died = False
        self._is_suspected = False
        self._is_reported = False
        self._end_text = ""
        self._gone: Future[None] = Future()
        self._gone.set_running_or_notify_cancel()
        self._hello: Hello | None = None
        self._is_here = False
        self._actor = make_actor(birth, options, self._mark)
        self._actor.lives.remote().future().add_done_callback(self._has_ended)

    async def start(self) -> None:
        """Wait until the role's object is made; see `Launcher.launch`."""
        spec = replace(self._spec, restart=RestartPolicy())  # whose hook may be local to a function
        limit = asyncio.timeout(self._birth.deadline_s)
        try:
            async with limit:
                self._hello = await self._ask("", self._actor.hello.remote())
                self._is_here = self._hello.node == ray.get_runtime_context().get_node_id()
                context = replace(self._birth.context, address=self._hello.address)
                await self.call("", to_wire(Call([spec], "", (spec, context), {}).pack()))
        except BaseException as error:
            text = await asyncio.to_thread(self._say_late) if isinstance(error, TimeoutError) else ""
            await self.kill("was ended, as its start failed")
            if isinstance(error, TimeoutError) and limit.expired():
                raise named(DeadlineError(text), spec) from None
            raise

    @property
    def lost_its_node(self) -> bool:
        """True where it ended before it had begun, as Ray did not know yet that the node was gone."""
        return self._hello is None and "its node has died" in self._end_text

    @property
    def pid(self) -> int:
        """See `Incarnation.pid`."""
        return 0 if self._hello is None else self._hello.pid

    @property
    def is_alive(self) -> bool:
        """See `Incarnation.is_alive`."""
        return self._because is None and not self._gone.done()

    @property
    def last_heard(self) -> str:
        """See `Incarnation.last_heard`."""
        return self._calls.last_heard

    @property
    def under_way(self) -> str:
        """See `Incarnation.under_way`."""
        return self._calls.under_way

    async def stacks(self, deadline_s: float) -> str:
        """See `Incarnation.stacks`: a thread of the actor answers, else its handler of a signal."""

        async def ask() -> str:
            return str(await self._ask(STACKS, self._actor.stacks.remote()))

        return await ask_then_dump(ask, self._dump, deadline_s)

    async def call(self, method: str, parcel: Any) -> Any:
        """See `Incarnation.call`."""
        number, future = self._calls.begin(method)
        try:
            if not future.done():
                if not self._outgoing:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._outgoing.append((number, parcel))
            return await asyncio.wrap_future(future)
        finally:
            self._calls.forget(number)

    def watch(self, callback: Callable[[RLError], None]) -> None:
        """See `Incarnation.watch`."""
        with self._lock:
            has_died = self._has_died
            if not has_died:
                self._watchers.append(callback)
        if has_died and self._because is None:
            callback(self._failure(None))

    async def close(self) -> None:
        """See `Incarnation.close`."""
        if self._because is None:
            self._because, self._is_closed = "was closed; start it again before calling it", True
        try:
            if not self._gone.done():
                async with asyncio.timeout(self._close_deadline_s):
                    await asyncio.wrap_future(self._actor.end.remote().future())
        except TimeoutError:
            pass  # it is killed
        except ray.exceptions.RayError:
            pass  # it died on the way
        finally:
            await self._end()

    async def kill(self, because: str) -> None:
        """See `Incarnation.kill`."""
        self._because = self._because or because
        await self._end()

    # -- inside

    async def _ask(self, method: str, answer: Any) -> Any:
        """Wait for what the actor says of itself, as for a call."""
        number, future = self._calls.begin(method)
        answer.future().add_done_callback(self._settler(number, None))
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.forget(number)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        frame, self._num_frames = self._num_frames, self._num_frames + 1
        parcels = [parcel for _, parcel in outgoing]
        for index, (number, _) in enumerate(outgoing):
            is_first = index == 0
            answer = self._actor.run.remote(frame, index, *(parcels if is_first else ()))
            answer.future().add_done_callback(self._settler(number, frame if is_first else None))

    def _settler(self, number: int, frame: int | None) -> Callable[["Future[Any]"], None]:
        """What to do with an answer of Ray; it is called in one of Ray's threads, which must not wait."""

        def settle(answer: "Future[Any]") -> None:
            error = answer.exception()
            if error is None:
                self._calls.settle(number, Packed(*answer.result()))
                return
            lost = named(RoleError(f"a call of {self._spec} was lost: {_shorten(error)}"), self._spec)
            if isinstance(error, ray.exceptions.RayActorError):
                self._suspect(error)  # its calls fail when its end is certain
                return
            if frame is not None:
                self._actor.skip.remote(frame)
            self._calls.fail(number, lost)

        return settle

    def _suspect(self, error: BaseException) -> None:
        """A call found no actor; Ray says soon whether it ended, and where it does not, that is its end too."""
        with self._lock:
            is_first, self._is_suspected = not self._is_suspected, True
        if is_first:
            timer = threading.Timer(SUSPECTED_S, self._report, (error,))
            timer.daemon = True
            timer.start()

    async def _dump(self, deadline_s: float) -> str:
        hello = self._hello
        if hello is None:
            return "It has not said yet where it is."
        if self._is_here:
            return await asyncio.to_thread(dump_of, hello.pid, self._mark, deadline_s=deadline_s)
        return await asyncio.to_thread(dump_there, hello, self._mark, deadline_s)

    async def _end(self) -> None:
        with contextlib.suppress(Exception):  # Ray is gone
            ray.kill(self._actor)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                await asyncio.wrap_future(self._gone)
        if self._is_here:
            await asyncio.to_thread(self._end_here)

    def _end_here(self) -> None:
        ends_at = time.monotonic() + GONE_S
        while is_running(self.pid) and time.monotonic() < ends_at:
            time.sleep(0.01)
        end_family(Family(self._mark))

    def _has_ended(self, lived: "Future[Any]") -> None:
        """Ray says so, in one of its threads, which must not wait."""
        threading.Thread(target=self._report, args=(lived.exception(),), name=f"end {self._spec}", daemon=True).start()

    def _report(self, error: BaseException) -> None:
        with self._lock:
            if self._is_reported:
                return
            self._is_reported = True
        with contextlib.suppress(Exception):
            ray.kill(self._actor)  # where Ray cannot reach it, and nobody can call it any more
        free_pools_of(self._mark)
        output = "" if self._because is not None else self._output()
        with self._lock:
            self._end_text = f"{output} Ray says: {_shorten(error)}"
            self._has_died = True
            watchers = self._watchers if self._because is None else []
        for callback in watchers:
            callback(self._failure(None))
        self._calls.fail_all(self._failure)
        self._gone.set_result(None)

    def _failure(self, method: str | None) -> RLError:
        if self._is_closed:
            return NotReadyError(f"{self._spec} {self._because}.")
        call = f" while {describe_call(method)} was waited for" if method is not None else ""
        where = "" if self._hello is None else f" (pid {self._hello.pid} on {self._hello.address})"
        text = (
            f"the actor of {self._spec}{where} ended{call}; the last thing heard from it was {self.last_heard}. "
            f"{self._end_text}"
        )
        if self._because is not None:
            text = f"{self._spec} {self._because}."
        return RoleDiedError(text, role=self._spec.name, rank=self._spec.rank)

    def _say_late(self) -> str:
        late = f"{self._spec} was not ready after {self._birth.deadline_s:g} s, and was ended; "
        if self._hello is None:
            return f"{late}Ray had no place, or no process, for its actor: {say_free()}."
        return (
            f"{late}{self._spec.factory} was still running in pid {self._hello.pid} on {self._hello.address}. Give it "
            f"a longer deadline. {self._output()}"
        )

    def _output(self) -> str:
        """Its last lines, from the node where they are."""
        hello = self._hello
        if hello is None:
            return "It printed nothing."
        if is_seen_here(hello.printed):
            return quote(read_printed(hello.printed))
        if hello.node not in {node["NodeID"] for node in ray_nodes() if node["Alive"]}:
            return "Its node is gone, and what it printed is there."
        try:
            return quote(read_there(hello, LAST_LINES_S))
        except ray.exceptions.RayError as error:
            return f"What it printed is on {hello.address}, which does not answer: {type(error).__name__}."


def make_actor(birth: Birth, options: ClusterOptions, mark: str) -> Any:
    """Ask Ray for an actor; nothing is waited for."""
    spec, slot = birth.spec, birth.slot
    log = None if options.log_directory is None else str(log_path(options.log_directory.absolute(), spec))
    paths = [*spec.environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    environment = {
        **spec.environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        MARK_VARIABLE: f"{os.environ.get(MARK_VARIABLE, '')}:{mark}",
    }
    wanted: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
    if slot is not None:
        wanted = {"num_cpus": slot.taken.cpus, "num_gpus": sum(slot.taken.gpus.values())}
        wanted["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            slot.request.group, placement_group_bundle_index=slot.index
        )
    remote: Any = ray.remote
    actor = remote(concurrency_groups={QUESTIONS: 1})(RoleActor)
    return actor.options(
        max_concurrency=MAX_WAITING,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": environment},
        **wanted,
    ).remote(Door(str(spec), birth.context.incarnation, mark, log))


def store(packed: Packed) -> Any:
    """Put a call into Ray's object store, for several actors."""
    return ray.put(to_wire(packed))


def read_there(hello: Hello, deadline_s: float) -> str:
    """The last lines that an actor printed, from its node.

    Raises:
        ray.exceptions.RayError: The node does not answer in time.
    """
    there = NodeAffinitySchedulingStrategy(hello.node, soft=False)
    reading = ray.remote(read_printed).options(num_cpus=0, scheduling_strategy=there).remote(hello.printed)
    return str(ray.get(reading, timeout=deadline_s))


def dump_there(hello: Hello, mark: str, deadline_s: float) -> str:
    """An actor's stacks, by a signal that a process of its node sends; or that there are none, and why."""
    there = NodeAffinitySchedulingStrategy(hello.node, soft=False)
    remote: Any = ray.remote
    try:
        asking = remote(dump_of).options(num_cpus=0, scheduling_strategy=there)
        return str(ray.get(asking.remote(hello.pid, mark, deadline_s=deadline_s / 2), timeout=deadline_s))
    except ray.exceptions.RayError as error:
        return f"Nor does its node, {hello.address}, answer: {_shorten(error)}"


def _shorten(error: BaseException) -> str:
    """What Ray says of an end, without its advice."""
    return " ".join(str(error).split()).partition(" Some common causes")[0]
