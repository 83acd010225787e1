"""Options of roles: placement, resources and restarts."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from rl_core.cluster.ray.session import RayOptions
from rl_core.errors import SettingsError
from rl_core.record_fields import NonNegativeFloat, NonNegativeInt, PositiveInt, settings_record

Kind = Literal["inline", "process", "ray"]
Strategy = Literal["pack", "spread", "strict_pack", "strict_spread"]


@settings_record
class ClusterOptions:
    """Placement of roles.

    Attributes:
        kind: "inline": objects in this process, for use with a debugger. "process": one process per role on this
            machine. "ray": one Ray actor per role, on one machine or several.
        ray: Options of Ray; used only by "ray".
        log_directory: Folder for one log file per role, <role>-<rank>.log, with the role's output; on Ray, a folder on
            each node. None: processes print to stderr with the prefix [role[rank]] on each line, and Ray uses its own
            format.
        close_deadline_s: Maximum seconds for a role to close before its process is killed, or, in this process, before
            its async `close` is cancelled.
    """

    kind: Kind = "process"
    ray: RayOptions = field(default_factory=RayOptions)
    log_directory: Path | None = None
    close_deadline_s: Annotated[float, Ge(0)] = 20.0


@settings_record
class ResourcePool:
    """CPUs and GPUs reserved in equal slots; roles that name the same pool share it.

    A rank uses a whole slot unless its spec requests a part. To share a GPU, two roles request a part each, such as
    `gpus=0.5`: both then see the GPU and must divide its memory themselves.

    Attributes:
        name: Name of the pool, used in errors; equal names refer to one pool in all clusters of this process.
        size: Number of slots.
        cpus: CPUs per slot; 0 leaves CPUs to the operating system without accounting.
        gpus: GPUs per slot; above 1, a whole number.
        strategy: Ray's placement of the slots: "pack" prefers few nodes, "spread" many; "strict_pack" requires one
            node, "strict_spread" one node per slot. Without Ray, there is one node.
    """

    name: str
    size: PositiveInt
    cpus: NonNegativeFloat = 0.0
    gpus: NonNegativeFloat = 0.0
    strategy: Strategy = "pack"

    def __post_init__(self) -> None:
        """Check the GPUs."""
        check_gpus(f"pool {self.name!r}", self.gpus)


@settings_record
class RestartPolicy:
    """Policy for restarting a role that died, including a death before its object exists.

    Attributes:
        max_restarts: Maximum number of restarts; the next death is permanent. 0 disables restarts.
        within_s: Window in seconds; older restarts do not count. None counts all.
        scope: "role" restarts only the role that died; "group" restarts all ranks, for ranks that compute together.
        backoff_s: Pause in seconds before a restart, doubled for each counted restart up to 60 s.
    """

    max_restarts: NonNegativeInt = 0
    within_s: float | None = None
    scope: Literal["role", "group"] = "role"
    backoff_s: Annotated[float, Ge(0)] = 1.0


def check_gpus(who: str, gpus: float) -> None:
    """Check an amount of GPUs.

    Raises:
        SettingsError: It is a fraction above one GPU.
    """
    if gpus > 1 and gpus != int(gpus):
        raise SettingsError(f"{who} must request a whole number of GPUs, or a fraction of one; found {gpus:g}.")
