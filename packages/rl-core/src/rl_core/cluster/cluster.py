"""Starts roles in one kind of placement, and ends them together."""

import asyncio

from rl_core.cluster.group import RoleGroup
from rl_core.cluster.local import LocalLauncher
from rl_core.cluster.options import ClusterOptions, ResourcePool
from rl_core.cluster.pools import Slot, own_pool
from rl_core.cluster.ray.session import import_ray
from rl_core.cluster.role_process import Launcher
from rl_core.cluster.role_spec import RoleSpec
from rl_core.cluster.running_role import Role, within
from rl_core.errors import NotReadyError, SettingsError


class Cluster:
    """Starts roles; created by `open_cluster`. An async context manager that closes the cluster."""

    def __init__(self, launcher: Launcher) -> None:
        """Create a cluster that starts roles with this launcher."""
        self._launcher = launcher
        self._groups: list[RoleGroup] = []
        self._is_closed = False

    async def start(self, spec: RoleSpec, *, pool: ResourcePool | None = None, deadline_s: float) -> Role:
        """Start one role and wait for its object; see `start_group`."""
        return (await self.start_group(spec, size=1, pool=pool, deadline_s=deadline_s))[0]

    async def start_group(
        self, spec: RoleSpec, *, size: int, pool: ResourcePool | None = None, deadline_s: float
    ) -> RoleGroup:
        """Start equal roles together and wait for all objects; if one fails, all are ended.

        Args:
            spec: Specification of the roles; the group assigns ranks.
            size: Number of roles.
            pool: Pool of the roles; roles that request CPUs or GPUs without a pool get their own.
            deadline_s: Deadline for resources, processes and factories together.

        Raises:
            SettingsError: Too few resources exist in total, or the factory does not exist.
            DeadlineError: The roles were not ready in time; the message names what was missing.
            RoleDiedError: A process ended during the start, more often than `RoleSpec.restart` allows.
            RoleError: Ray cannot be reached.
            Exception: Whatever a factory raised.
        """
        if self._is_closed:
            raise NotReadyError("the cluster is closed; open another one.")
        if size < 1:
            raise SettingsError(f"role {spec.name!r} needs a size of at least 1; found size = {size}.")
        ends_at = asyncio.get_running_loop().time() + deadline_s
        await self._open(spec, deadline_s)
        slots = await self._take_slots(spec, size, pool, ends_at)
        left_s = max(ends_at - asyncio.get_running_loop().time(), 0.0)
        group = RoleGroup(spec, size=size, slots=slots, launcher=self._launcher)
        self._groups = [other for other in self._groups if any(role.state != "closed" for role in other)] + [group]
        try:
            await group.start(left_s, deadline_s=deadline_s)
        except BaseException:
            if group in self._groups:  # `close` or another start may have removed it
                self._groups.remove(group)
            raise
        return group

    async def close(self) -> None:
        """End every started role, then raise the first error."""
        self._is_closed = True
        groups, self._groups = self._groups, []
        try:
            results = await asyncio.gather(*(group.close() for group in reversed(groups)), return_exceptions=True)
        finally:
            await self._launcher.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def __aenter__(self) -> "Cluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _open(self, spec: RoleSpec, deadline_s: float) -> None:
        late = (
            f"{spec} waited {deadline_s:g} s for {self._launcher.place}, which did not answer. Start it, correct its "
            "address, or raise the deadline."
        )
        async with within(deadline_s, late):
            await self._launcher.open()

    async def _take_slots(
        self, spec: RoleSpec, size: int, pool: ResourcePool | None, ends_at: float
    ) -> list[Slot] | list[None]:
        pool = pool or own_pool(spec, size)
        if pool is None:
            return [None] * size
        if (pool.gpus or spec.gpus) and "CUDA_VISIBLE_DEVICES" in spec.environment:
            raise SettingsError(
                f"role {spec.name!r} requests GPUs, but its environment sets CUDA_VISIBLE_DEVICES, which the pool "
                "also sets. Remove one of them."
            )
        left_s = max(ends_at - asyncio.get_running_loop().time(), 0.0)
        return await self._launcher.pools.take(pool, [spec] * size, round(left_s, 1))


def open_cluster(options: ClusterOptions | None = None) -> Cluster:
    """Create a cluster of the configured kind; nothing runs until a role is started.

    Raises:
        MissingExtraError: Ray is requested but not installed.
        SettingsError: RAY_AUTH_MODE turns authentication off, or a token is missing.
    """
    options = options or ClusterOptions()
    if options.kind != "ray":
        return Cluster(LocalLauncher(options))
    import_ray(options.ray)
    from rl_core.cluster.ray.roles import RayLauncher  # it wraps an optional backend

    return Cluster(RayLauncher(options))
