"""What users choose about roles: where they run, what they may use, and whether they are started again."""

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
    """CPUs and GPUs that are set aside in equal slots; roles that name the same pool share it.

    A rank uses a whole slot, unless its spec asks for a part. Two roles that share GPUs ask for a
    part each, such as `gpus=0.5`: both then see the GPU, and agree by themselves on its memory.

    Attributes:
        name: Errors carry it; the same name is the same pool, in all clusters of this process.
        size: Number of slots.
        cpus: For each slot. 0 does not count CPUs: the operating system shares them.
        gpus: For each slot; above 1, a whole number.
        strategy: How Ray places the slots: "pack" on few nodes, "spread" over many, if it can; "strict_pack" on one
            node, "strict_spread" each on its own. There is one node without Ray.
    """

    name: str
    size: int
    cpus: float = 0.0
    gpus: float = 0.0
    strategy: Strategy = "pack"

    def __post_init__(self) -> None:
        """Refuse what no machine has."""
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
    """Refuse amounts that cannot be given.

    Raises:
        SettingsError: A negative one, or a part of several GPUs.
    """
    if not (cpus >= 0 and gpus >= 0 and math.isfinite(cpus) and math.isfinite(gpus)):
        raise SettingsError(f"{who} must ask for 0 or more CPUs and GPUs; found {cpus:g} and {gpus:g}.")
    if gpus > 1 and gpus != int(gpus):
        raise SettingsError(f"{who} must ask for a whole number of GPUs, or for a part of one; found {gpus:g}.")
