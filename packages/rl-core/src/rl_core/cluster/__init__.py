"""Roles and where they run: in this process, in processes of this machine, or on Ray."""

from rl_core.cluster.blocking import BlockingGroup
from rl_core.cluster.blocking_role import BlockingRole
from rl_core.cluster.cluster import Cluster, open_cluster
from rl_core.cluster.group import RoleGroup
from rl_core.cluster.options import ClusterOptions, ResourcePool, RestartPolicy
from rl_core.cluster.role import RestartedRole, Role
from rl_core.cluster.roles import RoleContext, RoleSpec

__all__ = [
    "BlockingGroup",
    "BlockingRole",
    "Cluster",
    "ClusterOptions",
    "ResourcePool",
    "RestartPolicy",
    "RestartedRole",
    "Role",
    "RoleContext",
    "RoleGroup",
    "RoleSpec",
    "open_cluster",
]
