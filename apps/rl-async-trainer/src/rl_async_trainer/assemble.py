"""Build the queue and the roles of an asynchronous run from its settings."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_async_trainer.settings import AsyncSettings
from rl_core import InProcessQueue, SharedMemoryQueue, TransferQueue
from rl_core.cluster import Cluster, ClusterOptions, RayOptions, RestartPolicy, Role, RoleSpec, open_cluster, start_ray
from rl_core.data import IntArray
from rl_core.queue import QueueOptions, RayQueue
from rl_trainer_parts.learning.distillation import has_teachers
from rl_trainer_parts.rollouts.setup import queue_tasks
from rl_trainer_parts.rollouts.skip_cache import with_absolute_cache

QUEUE = "queue"
ROLLOUTER = "rollouter"
LEARNER = "learner host"
TEACHERS = "teachers"


FACTORIES = {
    "rollouter": "rl_async_trainer.roles.rollouter:Rollouter",
    "learner": "rl_async_trainer.roles.learner:LearnerHost",
    "teachers": "rl_async_trainer.roles.teachers:TeacherHost",
}
"""Class of each role as "module:class"; a replacement has the methods of the class it replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of a run.

    Attributes:
        cluster: The cluster that started them.
        rollouter: See `Rollouter`.
        learner: See `LearnerHost`.
        teachers: See `TeacherHost`; None without teachers.
    """

    cluster: Cluster
    rollouter: Role
    learner: Role
    teachers: Role | None

    @property
    def all(self) -> dict[str, Role]:
        """All roles by name."""
        named = {"rollouter": self.rollouter, "learner": self.learner}
        return named if self.teachers is None else {**named, "teachers": self.teachers}


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
    start_ray(ray_options(settings))
    return RayQueue(tasks, options=options)


async def start_roles(
    settings: AsyncSettings,
    queue: TransferQueue,
    *,
    folder: Path,
    canary_sequences: Sequence[IntArray],
    prompts_digest: str,
    factories: Mapping[str, str],
) -> Roles:
    """Start every role's process; their models load later, on request.

    Raises:
        RoleError: A role cannot start.
    """
    roles, logs = settings.roles, folder / "logs"
    cluster = open_cluster(
        ClusterOptions(kind=roles.placement, ray=ray_options(settings), log_directory=logs, close_deadline_s=60.0)
    )
    common: dict[str, Any] = {"settings": with_absolute_cache(settings), "queue": queue}
    specs = [
        _spec(
            ROLLOUTER,
            factories["rollouter"],
            roles.rollouter_restarts,
            log_directory=logs,
            prompts_digest=prompts_digest,
            **common,
        ),
        _spec(
            LEARNER,
            factories["learner"],
            roles.learner_restarts,
            canary_sequences=list(canary_sequences),
            folder=folder,
            **common,
        ),
    ]
    if has_teachers(settings):
        specs.append(_spec(TEACHERS, factories["teachers"], roles.teacher_restarts, folder=folder, **common))
    try:
        starting = (cluster.start(spec, deadline_s=roles.start_deadline_s) for spec in specs)
        started = await asyncio.gather(*starting)
    except BaseException:
        await cluster.close()
        raise
    teachers = started[2] if len(started) > 2 else None
    return Roles(cluster=cluster, rollouter=started[0], learner=started[1], teachers=teachers)


def ray_options(settings: AsyncSettings) -> RayOptions:
    """The Ray cluster to join, or to start on this machine."""
    return RayOptions(address=settings.cluster.ray_address)


def _spec(name: str, factory: str, max_restarts: int, **kwargs: Any) -> RoleSpec:
    return RoleSpec(
        name=name,
        factory=factory,
        kwargs=kwargs,
        restart=RestartPolicy(max_restarts=max_restarts, backoff_s=0.2),
    )
