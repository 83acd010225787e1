"""Runs any engine in its own process, on this machine or on Ray, with the same protocol."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rl_core.cluster import (
    ClusterOptions,
    Incarnation,
    Methods,
    ResourcePool,
    RestartPolicy,
    Role,
    RoleSpec,
    open_cluster,
    within,
)
from rl_core.data import ImageSpan, IntArray
from rl_core.errors import (
    EngineDiedError,
    EngineError,
    NotReadyError,
    RLError,
    RoleDiedError,
    RoleError,
    WeightsGoneError,
)
from rl_core.gpus import GpuUse, gpu_use_of
from rl_core.record_fields import converts_arguments, settings_record
from rl_core.weights import InFile, InProcess, SharedBuckets, TokenScores, WeightReceipt, WeightUpdate
from rl_rollout.engines.options import engine_class
from rl_rollout.engines.protocol import (
    EngineTraits,
    GenerateRequest,
    Generation,
    NewTokens,
    RolloutEngine,
)
from rl_rollout.engines.requests import only_given
from rl_rollout.engines.streaming import TokenStream

T = TypeVar("T")

OF_THIS_LIFE = ("sees", "update_weights", "drop_adapter", "more_tokens", "gpu_use")
"""Calls that do not wait for a restart: `on_restart` sends newer weights than theirs, and the rest is lost."""


@settings_record
class EnginePlacement:
    """Placement of an engine's process.

    Attributes:
        cluster: "process" for this machine, or "ray".
        pool: Resources that it may use. None shares all of them.
        environment: Environment variables for its process only.
        max_restarts: Maximum number of restarts after the process dies. A failure of the model counts as a death.
        deadline_s: Maximum seconds to wait for the process, and again for its engine.
    """

    cluster: ClusterOptions = ClusterOptions()
    pool: ResourcePool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    deadline_s: float = 600.0


class EngineClient:
    """The engine protocol's methods on top of an `EngineServer` in another process."""

    def __init__(self, server: "EngineServer") -> None:
        """Store the server's methods."""
        self._server = server
        self._sees_files: bool | None = None

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`. A streamed request polls for tokens until it ends."""
        on_tokens = request.on_tokens
        if on_tokens is None:
            return await self._server.generate(request)
        name, ended = uuid.uuid4().hex, dict[int, Generation]()
        try:
            pieces = await self._server.begin_stream(name, replace(request, on_tokens=None))
            while True:
                for piece in pieces:
                    on_tokens(piece)
                    if piece.ended is not None:
                        ended[piece.sample_index] = piece.ended
                if len(ended) == request.num_samples:
                    return [ended[index] for index in range(request.num_samples)]
                pieces = await self._server.more_tokens(name)
        finally:
            if len(ended) < request.num_samples:  # the rest is not needed
                dropping = asyncio.ensure_future(self._drop_stream(name))
                _dropping.add(dropping)
                dropping.add_done_callback(_dropping.discard)

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        top_k: int = 0,
        with_experts: bool = False,
        images: Sequence[tuple[ImageSpan, ...]] = (),
        adapter: str | None = None,
    ) -> list[TokenScores]:
        """See `RolloutEngine.score`."""
        asked = list(sequences)
        return await self._server.score(
            asked, top_k=top_k, with_experts=with_experts, images=list(images), adapter=adapter
        )

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `RolloutEngine.update_weights`. Sends the file's content if the engine cannot read the file."""
        return await self._server.update_weights(update, await self._unseen_content(update))

    async def drop_adapter(self, name: str) -> None:
        """See `RolloutEngine.drop_adapter`."""
        await self._server.drop_adapter(name)

    async def gpu_use(self) -> list[GpuUse]:
        """Return the use of each of the engine's GPUs since the last call; empty on CPUs."""
        return await self._server.gpu_use()

    async def abort(self, request_ids: Collection[str] | None) -> None:
        """See `RolloutEngine.abort`."""
        await self._server.abort(None if request_ids is None else list(request_ids))

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """See `RolloutEngine.sleep`."""
        await self._server.sleep(level)

    async def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        await self._server.wake()

    async def _unseen_content(self, update: WeightUpdate) -> NDArray[np.uint8] | None:
        """Return the content of an update's file, or None if the engine can take the update from where it is."""
        if isinstance(update.location, InProcess):
            raise EngineError(
                "an engine in its own process needs weights from a file; found tensors of this process. Pack the "
                "update with rl_core.weights.SharedFileTransport."
            )
        if not isinstance(update.location, InFile):
            return None
        file = update.location.file
        if not file.is_file():
            raise WeightsGoneError(
                f"the file of weight update {update.version} no longer exists: {file}. Keep its transport open until "
                "every engine has loaded it."
            )
        if self._sees_files is None:
            self._sees_files = await self._server.sees(file)
        return None if self._sees_files else np.memmap(file, dtype=np.uint8, mode="r")

    async def _drop_stream(self, name: str) -> None:
        with suppress(RLError):  # the engine may have died
            await self._server.drop_stream(name)


_dropping: set["asyncio.Future[None]"] = set()


class ProcessEngine(EngineClient):
    """A `RolloutEngine` whose model lives in its own process, which ends with this one.

    Weights arrive as a file (`rl_core.weights.SharedFileTransport`), over the network, or in shared GPU memory
    (`rl_core.weights.ipc.IpcTransport`). If a caller is cancelled, its request runs until it ends or is aborted. A
    streaming caller cancels its request. After the process dies, its calls raise EngineDiedError. If the host allows
    restarts, later calls wait for the next process.

    Attributes:
        on_restart: Called with the engine of a restarted process before any other request, to send it its weights.
    """

    @converts_arguments
    def __init__(
        self, name: str, model_dir: Path, options: object = None, *, host: EnginePlacement | None = None, index: int = 0
    ) -> None:
        """Choose an engine. `start` starts its process.

        Args:
            name: A name from `rl_rollout.engines.options`, such as "vllm".
            model_dir: A Hugging Face folder.
            options: The engine's options.
            host: Placement of its process. By default, a process on this machine.
            index: Index among equal engines, for messages and logs.
        """
        super().__init__(cast("EngineServer", Methods(self._call_started)))
        self._host = host or EnginePlacement()
        self._spec = RoleSpec(
            name=f"{name} engine",
            rank=index,
            factory="rl_rollout.engines.process:EngineServer",
            kwargs={"name": name, "model_dir": Path(model_dir), "options": options},
            environment=self._host.environment,
            restart=RestartPolicy(max_restarts=self._host.max_restarts),
        )
        self._role: Role | None = None
        self._traits: EngineTraits | None = None
        self._is_closed = False
        self._died_in = 0
        self.on_restart: Callable[[EngineClient], Awaitable[None]] | None = None

    @property
    def traits(self) -> EngineTraits:
        """See `RolloutEngine.traits`."""
        if self._traits is None or self._is_closed:
            raise NotReadyError(f"the engine {'is closed' if self._is_closed else 'has not been started'}.")
        return self._traits

    @property
    def state(self) -> str:
        """State of the process: starting, serving, restarting, dead (permanently) or closed."""
        if self._role is None:
            return "closed"
        is_gone = self._role.state == "serving" and self._role.incarnation == self._died_in
        return "restarting" if is_gone else self._role.state

    @property
    def death(self) -> EngineDiedError | None:
        """Why the process ended permanently, as described by the caller's side."""
        error = None if self._role is None else self._role.death
        return None if error is None else _engine_died(error)

    @property
    def pid(self) -> int:
        """Process id on its host."""
        if self._role is None:
            raise NotReadyError("the engine has no process.")
        return self._role.pid

    async def start(self) -> None:
        """See `RolloutEngine.start`."""
        if self._is_closed:
            raise NotReadyError("the engine is closed; create a new one.")
        if self._traits is not None:
            return
        host = self._host
        try:
            self._role = await open_cluster(host.cluster).start(self._spec, pool=host.pool, deadline_s=host.deadline_s)
        except RoleError as error:
            raise EngineError(f"the engine could not start: {error}") from error
        async with within(host.deadline_s, f"{self._spec} did not load its model within {host.deadline_s:g} s."):
            try:
                await self._role.set_up(self._set_up)
            except RoleError as error:
                raise _engine_died(error) from error

    async def stacks(self, *, deadline_s: float) -> str:
        """Return the stacks of its process, even if it does not respond. See `rl_core.cluster.Role.stacks`."""
        role = self._role
        return f"{self._spec} has no process." if role is None else await role.stacks(deadline_s=deadline_s)

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._is_closed = True
        role, self._role = self._role, None
        if role is not None:
            await role.close()

    async def _call_started(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.traits  # noqa: B018 - raises unless started
        if method in OF_THIS_LIFE and self.state == "restarting":
            lost = {"more_tokens": "its streams are lost", "gpu_use": "its GPU figures are lost"}
            what = lost.get(method, "it accepts no weights now")
            raise EngineDiedError(f"the process of {self._spec} is restarting; {what}.")
        if self._role is None:
            raise NotReadyError("the engine is closed.")
        role, incarnation = self._role, self._role.incarnation
        try:
            return await role.call(method, *args, **kwargs)
        except RoleError as error:
            if incarnation == role.incarnation and isinstance(error, RoleDiedError):
                self._died_in = incarnation  # the call fails before the role reports the death
            raise _engine_died(error) from error

    async def _set_up(self, role: Incarnation) -> None:
        """Load the model, and bring a restarted process to the state of the other engines."""
        server: EngineServer = role.methods()
        is_first, self._traits = self._traits is None, await server.start()
        if self.on_restart is not None and not is_first:
            await self.on_restart(EngineClient(server))


class EngineServer:
    """The engine inside its process. `start` sends its traits. A failed engine ends its process.

    Remote callers of streams poll for tokens. Unread tokens wait here.
    """

    def __init__(self, name: str, model_dir: Path, options: object) -> None:
        """Create the engine without starting it."""
        self._engine: RolloutEngine = engine_class(name)(model_dir, options)
        self._streams: dict[str, TokenStream] = {}

    async def start(self) -> EngineTraits:
        """Start the engine."""
        await self._engine.start()
        return self._engine.traits

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        return await _or_end(self._engine.generate(request))

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        top_k: int,
        with_experts: bool,
        images: Sequence[tuple[ImageSpan, ...]],
        adapter: str | None,
    ) -> list[TokenScores]:
        """See `RolloutEngine.score`."""
        more = only_given(images=images, adapter=adapter)
        return await _or_end(self._engine.score(sequences, top_k=top_k, with_experts=with_experts, **more))

    async def drop_adapter(self, name: str) -> None:
        """See `RolloutEngine.drop_adapter`."""
        await _or_end(self._engine.drop_adapter(name))

    async def abort(self, request_ids: Collection[str] | None) -> None:
        """See `RolloutEngine.abort`."""
        await _or_end(self._engine.abort(request_ids))

    async def sleep(self, level: Literal[1, 2]) -> None:
        """See `RolloutEngine.sleep`."""
        await _or_end(self._engine.sleep(level))

    async def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        await _or_end(self._engine.wake())

    async def gpu_use(self) -> list[GpuUse]:
        """See `EngineClient.gpu_use`; empty for an engine that does not report its GPUs."""
        return await gpu_use_of(self._engine)

    async def begin_stream(self, name: str, request: GenerateRequest) -> list[NewTokens]:
        """Start to generate under a name, and return the first tokens."""
        self._streams[name] = TokenStream(self._engine, request)
        return await self.more_tokens(name)

    async def more_tokens(self, name: str) -> list[NewTokens]:
        """Return the tokens since the last call.

        Raises:
            EngineError: See `generate`. Also raised if the stream belongs to an earlier engine.
        """
        tokens = self._streams.get(name)
        if tokens is None:
            raise EngineError("the engine restarted and lost its streams. Send the request again.")
        is_over = True
        try:
            pieces = await _or_end(tokens.next())
            is_over = not tokens.num_open
        finally:
            if is_over:
                await self.drop_stream(name)
        return pieces

    async def drop_stream(self, name: str) -> None:
        """Cancel a stream that its caller no longer reads."""
        tokens = self._streams.pop(name, None)
        if tokens is not None:
            await tokens.close()

    async def sees(self, file: Path) -> bool:
        """Return True if the file of the learner's host is also visible here."""
        return file.is_file()

    async def update_weights(self, update: WeightUpdate, content: NDArray[np.uint8] | None) -> WeightReceipt:
        """See `RolloutEngine.update_weights`.

        Args:
            update: The update, with its file.
            content: The file's bytes, if the file is not on this host.
        """
        if content is not None:
            from safetensors.torch import load

            update = replace(update, location=InProcess(tensors=load(content.tobytes())))
        if isinstance(update.location, SharedBuckets):
            from rl_core.weights.ipc import opened

            with opened(update) as tensors:
                opened_here = replace(update, location=InProcess(tensors=tensors))
                return await _or_end(self._engine.update_weights(opened_here))
        return await _or_end(self._engine.update_weights(update))

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        await self._engine.close()


def _engine_died(error: RLError) -> EngineDiedError:
    return EngineDiedError(f"the engine failed and no longer serves: {error}")


async def _or_end(answer: Awaitable[T]) -> T:
    """Wait for an answer. If the engine has failed, end the process so that it can restart."""
    try:
        return await answer
    except EngineDiedError as error:
        raise SystemExit(str(error)) from error
