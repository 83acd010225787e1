"""Resource pools of this process: reserved for the first role, released after the last one closes."""

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.cluster.options import ResourcePool
from rl_core.cluster.role_spec import RoleSpec
from rl_core.cluster.shares import Shares, Taken, count_room, describe_shares, empty_slot, machine_shares
from rl_core.errors import DeadlineError, SettingsError

PAUSE_S = 0.05


class Reserver(Protocol):
    """Reserves resources on this machine or Ray. Methods do not block."""

    def begin(self, pool: ResourcePool) -> Any:
        """Request a pool; return the handle of the request for the other methods.

        Raises:
            SettingsError: The placement has too few resources in total.
        """
        ...

    def try_reserve(self, pool: ResourcePool, request: Any) -> list[Shares] | None:
        """Return the slots; None while other users hold the resources."""
        ...

    def free(self, request: Any) -> None:
        """Release the pool, whether reserved or not."""
        ...

    def describe_free(self) -> str:
        """Describe total and free resources."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A role's slot in a pool.

    Attributes:
        pool: The pool.
        index: Index of the slot.
        taken: The role's part of the slot.
        request: The reserver's handle of the pool.
    """

    pool: ResourcePool
    index: int
    taken: Taken
    request: Any


@dataclass(slots=True)
class _Entry:
    """A pool in use or being requested."""

    pool: ResourcePool
    request: Any
    slots: list[Shares] | None = None
    num_users: int = 0


class PoolBook:
    """The pools of one kind of cluster in this process; usable from all threads and event loops."""

    def __init__(self, reserver: Reserver) -> None:
        """Initialize without pools."""
        self._reserver = reserver
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    async def take(self, pool: ResourcePool, specs: Sequence[RoleSpec], deadline_s: float) -> list[Slot]:
        """Take a slot for each role, all or none; reserve the pool if it is not in use.

        Raises:
            SettingsError: The pool or the total resources are too small, or a different pool has this name.
            DeadlineError: Other users held the resources until the deadline.
        """
        _check_fits(pool, specs)
        ends_at = time.monotonic() + deadline_s
        entry = self._join(pool, num_users=len(specs))
        try:
            while (slots := self._try_place(entry, specs)) is None:
                if time.monotonic() > ends_at:
                    raise DeadlineError(_describe_shortage(self._reserver, entry, specs, deadline_s))
                await asyncio.sleep(PAUSE_S)
        except BaseException:
            self._leave(entry, num_users=len(specs))
            raise
        return slots

    def give_back(self, slot: Slot) -> None:
        """Return a role's slot."""
        with self._lock:
            entry = self._entries[slot.pool.name]
            if entry.slots is not None:
                entry.slots[slot.index].give_back(slot.taken)
        self._leave(entry, num_users=1)

    def _join(self, pool: ResourcePool, *, num_users: int) -> _Entry:
        with self._lock:
            entry = self._entries.get(pool.name)
            if entry is None:
                entry = self._entries[pool.name] = _Entry(pool, self._reserver.begin(pool))
            elif entry.pool != pool:
                raise SettingsError(
                    f"pool name {pool.name!r} is used twice: {entry.pool} is in use, and {pool} is requested. Rename "
                    "one of them."
                )
            entry.num_users += num_users
            return entry

    def _leave(self, entry: _Entry, *, num_users: int) -> None:
        with self._lock:
            entry.num_users -= num_users
            if not entry.num_users:
                del self._entries[entry.pool.name]
                self._reserver.free(entry.request)

    def _try_place(self, entry: _Entry, specs: Sequence[RoleSpec]) -> list[Slot] | None:
        with self._lock:
            if entry.slots is None:
                entry.slots = self._reserver.try_reserve(entry.pool, entry.request)
            return None if entry.slots is None else _place(entry, entry.slots, specs)


class LocalReserver:
    """Reserves CPUs and GPUs of this machine; a request's handle is the list of its reserved shares."""

    def __init__(self) -> None:
        """Initialize with everything free."""
        self._requests: list[list[Taken]] = []

    def begin(self, pool: ResourcePool) -> list[Taken]:
        """See `Reserver.begin`."""
        there = machine_shares()
        room = count_room(there, pool.cpus, pool.gpus, at_most=pool.size)
        if room < pool.size:
            raise SettingsError(
                f"pool {pool.name!r} requests {pool.size} slots of {describe_shares(pool.cpus, pool.gpus)} each; this "
                f"machine has {describe_shares(there.cpus, len(there.gpus))}, enough for {room}. Request less, or set "
                "cpus = 0 to share the CPUs."
            )
        request: list[Taken] = []
        self._requests.append(request)
        return request

    def try_reserve(self, pool: ResourcePool, request: list[Taken]) -> list[Shares] | None:
        """See `Reserver.try_reserve`."""
        free = self._free()
        taken = [free.take(pool.cpus, pool.gpus) for _ in range(pool.size)]
        if None in taken:
            return None
        request += [one for one in taken if one is not None]
        return [Shares(one.cpus, one.gpus) for one in request]

    def free(self, request: list[Taken]) -> None:
        """See `Reserver.free`."""
        self._requests = [other for other in self._requests if other is not request]

    def describe_free(self) -> str:
        """See `Reserver.describe_free`."""
        free = self._free()
        return (
            f"this machine has {describe_shares(free.cpus, len(free.gpus))}; free: "
            f"{describe_shares(free.free_cpus, sum(free.free_gpus.values()))}"
        )

    def _free(self) -> Shares:
        free = machine_shares()
        for request in self._requests:
            for taken in request:
                free.free_cpus -= taken.cpus
                for device, part in taken.gpus.items():
                    if device in free.free_gpus:
                        free.free_gpus[device] -= part
        return free


LOCAL_POOLS = PoolBook(LocalReserver())
"""The local pools of this process; clusters that name the same pool share it."""


def own_pool(spec: RoleSpec, size: int) -> ResourcePool | None:
    """Create a pool for roles that request resources without a pool."""
    cpus, gpus = spec.cpus or 0.0, spec.gpus or 0.0
    if not cpus and not gpus:
        return None
    return ResourcePool(name=f"{spec.name} ({next(_OWN_NUMBERS)})", size=size, cpus=cpus, gpus=gpus)


_OWN_NUMBERS = itertools.count(1)


def _part(pool: ResourcePool, spec: RoleSpec) -> tuple[float, float]:
    return pool.cpus if spec.cpus is None else spec.cpus, pool.gpus if spec.gpus is None else spec.gpus


def _check_fits(pool: ResourcePool, specs: Sequence[RoleSpec]) -> None:
    """Check that the pool could hold the roles if it were empty.

    Raises:
        SettingsError: The pool is too small.
    """
    cpus, gpus = _part(pool, specs[0])
    room = pool.size * count_room(empty_slot(pool), cpus, gpus, at_most=len(specs))
    if pool.cpus == 0 and pool.gpus == 0 and (cpus or gpus):
        room = 0
    if room < len(specs):
        raise SettingsError(
            f"{len(specs)} of role {specs[0].name!r} request {describe_shares(cpus, gpus)} each from pool "
            f"{pool.name!r}, which has {pool.size} slots of {describe_shares(pool.cpus, pool.gpus)}, enough for "
            f"{room}. Enlarge the pool or request less."
        )


def _place(entry: _Entry, slots: list[Shares], specs: Sequence[RoleSpec]) -> list[Slot] | None:
    """Assign slots to roles round-robin: rank 0 to the first slot, rank 1 to the next."""
    placed: list[Slot] = []
    for number, spec in enumerate(specs):
        order = (index % len(slots) for index in range(number, number + len(slots)))
        for index in order:
            taken = slots[index].take(*_part(entry.pool, spec))
            if taken is not None:
                placed.append(Slot(pool=entry.pool, index=index, taken=taken, request=entry.request))
                break
    if len(placed) == len(specs):
        return placed
    for slot in placed:
        slots[slot.index].give_back(slot.taken)
    return None


def _describe_shortage(reserver: Reserver, entry: _Entry, specs: Sequence[RoleSpec], deadline_s: float) -> str:
    pool = entry.pool
    wanted = f"{len(specs)} of role {specs[0].name!r} waited {deadline_s:g} s for "
    if entry.slots is None:
        whole_pool = f"pool {pool.name!r}: {pool.size} slots of {describe_shares(pool.cpus, pool.gpus)} each"
        return f"{wanted}{whole_pool}; {reserver.describe_free()}. Release resources or request less."
    cpus = sum(slot.free_cpus for slot in entry.slots)
    gpus = sum(sum(slot.free_gpus.values()) for slot in entry.slots)
    return (
        f"{wanted}{describe_shares(*_part(pool, specs[0]))} each from pool {pool.name!r}, which has {pool.size} slots "
        f"of {describe_shares(pool.cpus, pool.gpus)}, with {describe_shares(cpus, gpus)} free in total. Close a role "
        "that uses the pool, or request a fraction of a slot."
    )
