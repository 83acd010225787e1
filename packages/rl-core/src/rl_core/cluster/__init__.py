"""Roles that run in this process, in processes on this machine, or on Ray.

Users configure roles with `options` and `role_spec`, and use `cluster`, `group`, `running_role` and `blocking`; `pools`
and `shares` account for CPUs and GPUs. `role_process` is the interface of every placement: objects in this process and
`processes.role_process` (its child side is `child`), started by `local`, and `ray.role_process` (its actor side is
`actor`), started by `ray.roles`. Calls use `calls`, `packing`, `frames` and `messages`. `served` runs the role's
object, `output` handles its printed lines, `stacks` and `stack_dump` show its current activity, and
`guard` ends its leftover processes.
"""

from rl_core.cluster.blocking import BlockingGroup
from rl_core.cluster.cluster import Cluster, open_cluster
from rl_core.cluster.group import RoleGroup
from rl_core.cluster.options import ClusterOptions, ResourcePool, RestartPolicy
from rl_core.cluster.ray.session import RayOptions, start_ray, stop_ray
from rl_core.cluster.restarts import RoleRestartedError, SupervisedRole
from rl_core.cluster.role_spec import RoleContext, RoleSpec
from rl_core.cluster.running_role import Incarnation, Methods, Role, SetUp, within
from rl_core.cluster.shares import Shares, count_room, describe_shares, machine_shares, visible_gpus
from rl_core.cluster.stacks import RoleReport, RoleView, cut_middle, process_report, process_stacks

__all__ = [
    "BlockingGroup",
    "Cluster",
    "ClusterOptions",
    "Incarnation",
    "Methods",
    "RayOptions",
    "ResourcePool",
    "RestartPolicy",
    "Role",
    "RoleContext",
    "RoleGroup",
    "RoleReport",
    "RoleRestartedError",
    "RoleSpec",
    "RoleView",
    "SetUp",
    "Shares",
    "SupervisedRole",
    "count_room",
    "cut_middle",
    "describe_shares",
    "machine_shares",
    "open_cluster",
    "process_report",
    "process_stacks",
    "start_ray",
    "stop_ray",
    "visible_gpus",
    "within",
]
