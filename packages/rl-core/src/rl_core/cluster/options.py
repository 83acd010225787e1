"""Options of roles: placement, resources and restarts."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from rl_core.cluster.ray.session import RayOptions
from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record

Kind = Literal["inline", "process", "ray"]
Strategy = Literal["pack", "spread", "strict_pack", "strict_spread"]
RestartHook = Callable[[Sequence[Any]], Awaitable[None] | None]


@settings_record
class ClusterOptions:
    """Where roles run.

    Attributes:
        kind: "inline": objects of this process, where a debugger works. "process": each role in a process of this
            machine. "ray": each role in a Ray actor, on one machine or many.
        ray: Which Ray; used by "ray" alone.
        log_directory: Folder that gets a file <role>-<rank>.log for each role, with what it prints; on Ray, a folder of
            each node. None: what processes print comes on stderr with [role[rank]] before each line, and Ray does it in
            its own way.
        close_deadline_s: How long a role may take to close before its process is killed; in this process, before its
            async `close` is cancelled.
    """

    kind: Kind = "process"
    ray: RayOptions = field(default_factory=RayOptions)
    log_directory: Path | None = None
    close_deadline_s: float = 20.0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.close_deadline_s < 0:
            raise SettingsError(f"close_deadline_s must be 0 or more; found {self.close_deadline_s:g}.")


@settings_record
class ResourcePool:
    """CPUs and GPUs reserved in equal slots; roles that name the same pool share it.

    A rank uses a whole slot unless its spec requests a part. To share a GPU, two roles request a part each, such as
    `gpus=0.5`: both then see the GPU and must divide its memory themselves.

    Attributes:
        name: Name of the pool, used in errors; equal names refer to one pool in all clusters of this process.
        size: Number of slots.
        cpus: CPUs per slot. 0 does not count CPUs: the operating system shares them.
        gpus: GPUs per slot; must be whole above 1.
        strategy: Ray's placement of the slots: "pack" prefers few nodes, "spread" many; "strict_pack" requires one
            node, "strict_spread" one node per slot. Without Ray, there is one node.
    """

    name: str
    size: int
    cpus: float = 0.0
    gpus: float = 0.0
    strategy: Strategy = "pack"

    def __post_init__(self) -> None:
        """Check the amounts."""
        if self.size < 1:
            raise SettingsError(f"pool {self.name!r} must have a size of 1 or more; found {self.size}.")
        check_amounts(f"pool {self.name!r}", self.cpus, self.gpus)


@settings_record
class RestartPolicy:
    """Whether a role that died is started again, also where its process dies before its object is made.

    Attributes:
        max_restarts: How often; one death more ends it with the last error. 0 never starts it again.
        within_s: Restarts that are longer ago do not count; None counts all.
        scope: "role": the one that died, alone. "group": all ranks, for those that compute together.
        backoff_s: Pause before a restart, doubled for each that counts, 60 s at most.
        hook: Runs when a role is there again, and before calls are served: the name of a method of each restarted role,
            or a callable, plain or async, that gets them (`RestartedRole`). An engine gets its weights here.
    """

    max_restarts: int = 0
    within_s: float | None = None
    scope: Literal["role", "group"] = "role"
    backoff_s: float = 1.0
    hook: str | RestartHook | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.max_restarts < 0 or self.backoff_s < 0:
            raise SettingsError(
                f"max_restarts and backoff_s must be 0 or more; found {self.max_restarts} and {self.backoff_s:g}."
            )


def check_amounts(who: str, cpus: float, gpus: float) -> None:
    """Check amounts of CPUs and GPUs.

    Raises:
        SettingsError: An amount is negative, or a fraction above one GPU.
    """
    if not (cpus >= 0 and gpus >= 0 and math.isfinite(cpus) and math.isfinite(gpus)):
        raise SettingsError(f"{who} must ask for 0 or more CPUs and GPUs; found {cpus:g} and {gpus:g}.")
    if gpus > 1 and gpus != int(gpus):
        raise SettingsError(f"{who} must ask for a whole number of GPUs, or for a part of one; found {gpus:g}.")
