"""Roles and where they run."""

from rl_core.cluster.local import LocalCluster, Placement
from rl_core.cluster.roles import Cluster, RoleHandle, RoleSpec

__all__ = ["Cluster", "LocalCluster", "Placement", "RoleHandle", "RoleSpec"]
