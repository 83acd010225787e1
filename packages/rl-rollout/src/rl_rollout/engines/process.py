"""Any engine in a process of its own, behind the same protocol."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_core.cluster import ClusterOptions, Role, RoleSpec, open_cluster
from rl_core.errors import DeadlineError, EngineError, NotReadyError, RoleError
from rl_core.records import FloatArray, IntArray
from rl_core.weights import WeightReceipt, WeightUpdate
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, RolloutEngine
from rl_rollout.engines.registry import engine_class


class ProcessEngine:
    """A `RolloutEngine` whose model lives in a child process, which ends with this one.

    Weights come as a file (`rl_core.transports.SharedFileTransport`). A caller that is cancelled leaves its
    request running in the child until it is done or aborted.
    """

    def __init__(
        self,
        name: str,
        model_dir: Path,
        options: object = None,
        *,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        """Choose an engine; `start` starts its process.

        Args:
            name: As in `rl_rollout.engines.registry`, such as "vllm".
            model_dir: A Hugging Face folder.
            options: The engine's own.
            environment: Variables of its process alone, such as {"CUDA_VISIBLE_DEVICES": "1"}.
            deadline_s: Longest wait for the process, and again for its engine.
        """
        self._spec = RoleSpec(
            name=f"{name} engine",
            factory="rl_rollout.engines.process:HostedEngine",
            kwargs={"name": name, "model_dir": Path(model_dir), "options": options},
            environment=environment or {},
        )
        self._deadline_s = deadline_s
        self._role: Role | None = None
        self._traits: EngineTraits | None = None
        self._is_closed = False

    @property
    def traits(self) -> EngineTraits:
        """See `RolloutEngine.traits`."""
        if self._traits is None or self._is_closed:
            raise NotReadyError(f"the engine {'is closed' if self._is_closed else 'has not been started'}.")
        return self._traits

    async def start(self) -> None:
        """See `RolloutEngine.start`."""
        if self._is_closed:
            raise NotReadyError("the engine is closed; make a new one.")
        if self._traits is not None:
            return
        try:
            self._role = await open_cluster(ClusterOptions()).start(self._spec, deadline_s=self._deadline_s)
        except RoleError as error:
            raise EngineError(f"the engine could not start: {error}") from error
        try:
            self._traits = await asyncio.wait_for(self._call("start"), self._deadline_s)
        except TimeoutError:
            raise DeadlineError(f"{self._spec} had not loaded its model after {self._deadline_s:g} s.") from None

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        self.traits  # noqa: B018 - raises unless started
        generations: list[Generation] = await self._call("generate", request)
        return generations

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """See `RolloutEngine.score`."""
        self.traits  # noqa: B018
        scores: list[FloatArray] = await self._call("score", list(sequences))
        return scores

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `RolloutEngine.update_weights`."""
        self.traits  # noqa: B018
        if update.file is None:
            raise EngineError(
                "an engine in its own process takes weights from a file; found tensors of this process. Pack the "
                "update with rl_core.transports.SharedFileTransport."
            )
        receipt: WeightReceipt = await self._call("update_weights", replace(update, tensors=None))
        return receipt

    async def abort_all(self) -> None:
        """See `RolloutEngine.abort_all`."""
        self.traits  # noqa: B018
        await self._call("abort_all")

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._is_closed = True
        role, self._role = self._role, None
        if role is not None:
            await role.close()

    async def _call(self, method: str, *args: Any) -> Any:
        if self._role is None:
            raise NotReadyError("the engine is closed.")
        try:
            return await self._role.call(method, *args)
        except RoleError as error:
            raise EngineError(f"the engine failed and serves no more: {error}") from error


class HostedEngine:
    """The child's side: an engine whose traits come with `start`."""

    def __init__(self, name: str, model_dir: Path, options: object) -> None:
        """Make the engine, not started."""
        self._engine: RolloutEngine = engine_class(name)(model_dir, options)

    async def start(self) -> EngineTraits:
        """Start the engine."""
        await self._engine.start()
        return self._engine.traits

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        return await self._engine.generate(request)

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """See `RolloutEngine.score`."""
        return await self._engine.score(sequences)

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `RolloutEngine.update_weights`."""
        return await self._engine.update_weights(update)

    async def abort_all(self) -> None:
        """See `RolloutEngine.abort_all`."""
        await self._engine.abort_all()

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        await self._engine.close()
