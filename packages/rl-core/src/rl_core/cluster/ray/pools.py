"""Resource pools as Ray placement groups."""

import contextlib
import logging
import os
import uuid
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rl_core.cluster.options import ResourcePool
from rl_core.cluster.pools import PoolBook
from rl_core.cluster.processes.guard import MARK_VARIABLE
from rl_core.cluster.shares import Shares, count_room, describe_shares, empty_slot
from rl_core.errors import SettingsError

log = logging.getLogger(__name__)


class RayReserver:
    """Reserves CPUs and GPUs of a Ray cluster."""

    def begin(self, pool: ResourcePool) -> PlacementGroup:
        """See `Reserver.begin`."""
        check_room(pool)
        bundle = {"CPU": pool.cpus, "GPU": pool.gpus, "memory": 1}  # one byte, because Ray refuses an empty bundle
        bundle = {name: amount for name, amount in bundle.items() if amount}
        name = f"{os.environ.get(MARK_VARIABLE, '')} {pool.name} {uuid.uuid4().hex}"  # see free_pools_of
        group: PlacementGroup = placement_group([bundle] * pool.size, strategy=pool.strategy.upper(), name=name)
        return group

    def try_reserve(self, pool: ResourcePool, request: PlacementGroup) -> list[Shares] | None:
        """See `Reserver.try_reserve`."""
        if not request.wait(0):
            return None
        return [empty_slot(pool) for _ in range(pool.size)]

    def free(self, request: PlacementGroup) -> None:
        """See `Reserver.free`."""
        if ray.is_initialized():
            remove_placement_group(request)

    def describe_free(self) -> str:
        """See `Reserver.describe_free`."""
        untyped: Any = ray
        there, free = untyped.cluster_resources(), untyped.available_resources()
        return f"the Ray cluster has {_describe(there)}; free: {_describe(free)}"


RAY_POOLS = PoolBook(RayReserver())
"""The Ray pools of this process; clusters that name the same pool share it."""


def free_pools_of(mark: str) -> None:
    """Release the pools of a dead role and its descendants, which Ray otherwise keeps while their driver is alive.

    Logs Ray's errors as warnings instead of raising them.

    Args:
        mark: Mark of its descendants; see `rl_core.cluster.processes.guard`.
    """
    if not ray.is_initialized():
        return
    try:
        for found in placement_group_table().values():
            if mark in found["name"] and found["state"] != "REMOVED":
                with contextlib.suppress(ValueError):  # already removed
                    remove_placement_group(get_placement_group(found["name"]))
    except Exception as error:
        log.warning("pools_not_freed mark=%s error=%s: %s", mark, type(error).__name__, error)


def check_room(pool: ResourcePool) -> None:
    """Check that an empty cluster could hold a pool.

    Raises:
        SettingsError: The cluster is too small.
    """
    nodes = [node for node in ray_nodes() if node["Alive"]]
    rooms = [count_room(_shares(node["Resources"]), pool.cpus, pool.gpus, at_most=pool.size) for node in nodes]
    room = sum(rooms)
    if pool.strategy == "strict_pack":
        room = max(rooms, default=0)
    elif pool.strategy == "strict_spread":
        room = sum(number > 0 for number in rooms)
    if room >= pool.size:
        return
    there = ", ".join(f"{node['NodeManagerAddress']}: {_describe(node['Resources'])}" for node in nodes)
    raise SettingsError(
        f"pool {pool.name!r} requests {pool.size} slots of {describe_shares(pool.cpus, pool.gpus)} each "
        f"({pool.strategy}); the Ray cluster has {len(nodes)} nodes ({there}), enough for {room}. Request less, add "
        "nodes, or set cpus = 0 to share the CPUs."
    )


def ray_nodes() -> list[dict[str, Any]]:
    """Return Ray's description of every node, including dead ones."""
    untyped: Any = ray
    found: list[dict[str, Any]] = untyped.nodes()
    return found


def _shares(resources: dict[str, float]) -> Shares:
    gpus = int(resources.get("GPU", 0))
    return Shares(resources.get("CPU", 0.0), {str(index): 1.0 for index in range(gpus)})


def _describe(resources: dict[str, Any]) -> str:
    return describe_shares(resources.get("CPU", 0.0), resources.get("GPU", 0.0))
