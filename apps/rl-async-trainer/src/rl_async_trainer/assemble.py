"""Build the queue and the roles of an asynchronous run from its settings."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_async_trainer.settings import AsyncSettings
from rl_core import InProcessQueue, SharedMemoryQueue, TransferQueue
from rl_core.cluster import Cluster, ClusterOptions, RayOptions, RestartPolicy, Role, RoleSpec, open_cluster, start_ray
from rl_core.data import IntArray
from rl_core.queue import QueueOptions, RayQueue
from rl_trainer_parts.learning.objective import has_teachers
from rl_trainer_parts.rollouts.setup import queue_tasks
from rl_trainer_parts.rollouts.skip_cache import with_absolute_cache

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


def open_role_cluster(settings: AsyncSettings, folder: Path) -> Cluster:
    """The cluster of the run's roles."""
    ray = RayOptions(address=settings.cluster.ray_address)
    return open_cluster(
        ClusterOptions(kind=settings.roles.placement, ray=ray, log_directory=folder / "logs", close_deadline_s=60.0)
    )


async def start_roles(
    cluster: Cluster,
    settings: AsyncSettings,
    queue: TransferQueue,
    *,
    folder: Path,
    canary_sequences: Sequence[IntArray],
    prompts_digest: str,
    factories: Mapping[str, str],
) -> dict[str, Role]:
    """Start the processes of rollouter, learner and, if there are any, teachers; their models load later, on request.

    Raises:
        RoleError: A role cannot start.
    """
    roles = settings.roles
    own: dict[str, tuple[int, dict[str, Any]]] = {
        "rollouter": (roles.rollouter_restarts, {"log_directory": folder / "logs", "prompts_digest": prompts_digest}),
        "learner": (roles.learner_restarts, {"canary_sequences": list(canary_sequences), "folder": folder}),
    }
    if has_teachers(settings):
        own["teachers"] = roles.teacher_restarts, {"folder": folder}
    common = {"settings": with_absolute_cache(settings), "queue": queue}
    specs = [
        RoleSpec(
            name=ROLE_NAMES[role],
            factory=factories[role],
            kwargs={**kwargs, **common},
            restart=RestartPolicy(max_restarts=max_restarts, backoff_s=0.2),
        )
        for role, (max_restarts, kwargs) in own.items()
    ]
    started = await asyncio.gather(*(cluster.start(spec, deadline_s=roles.start_deadline_s) for spec in specs))
    return dict(zip(own, started, strict=True))
