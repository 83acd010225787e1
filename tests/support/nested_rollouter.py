"""A role with an engine in a separate actor."""

from pathlib import Path
from typing import Any

from rl_core.cluster import ClusterOptions, ResourcePool
from rl_rollout.engines.options import TransformersOptions
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.streaming import stream
from rl_rollout.testing.reference_model import short_request


class Rollouter:
    """A role whose replica on Ray reserves all CPUs."""

    def __init__(self, model_dir: Path, num_cpus: int, cluster: ClusterOptions) -> None:
        """Start without an engine."""
        host = EnginePlacement(
            cluster=cluster,
            pool=ResourcePool(name="engine", size=1, cpus=num_cpus),
            environment={"OMP_NUM_THREADS": "1"},
            deadline_s=240,
        )
        self._engine = ProcessEngine("transformers", model_dir, TransformersOptions(max_model_len=64), host=host)
        self._replicas = ReplicatedEngine([self._engine])

    async def start(self) -> int:
        """Start the engine; return its process id."""
        await self._replicas.start()
        return self._engine.pid

    async def generate(self) -> Any:
        """Stream a few tokens."""
        pieces = [piece async for piece in stream(self._replicas, short_request(seed=3))]
        return [token for piece in pieces for token in piece.token_ids.tolist()]

    async def close(self) -> None:
        """End the engine."""
        await self._replicas.close()
