"""Starts Ray, and a role with children, in a process that is then killed, or closes everything, as argv says."""

import asyncio
import os
import sys

from rl_core.cluster import BlockingGroup, ClusterOptions, RoleSpec
from rl_core.cluster.guard import marked_processes
from rl_core.ray_session import RayOptions

SPEC = RoleSpec(name="echo", factory="rl_core.testing.cluster_role:EchoRole")


def main():
    options = ClusterOptions(kind="ray", ray=RayOptions(num_cpus=1, object_store_bytes=100 << 20))
    group = BlockingGroup.start(options, SPEC, size=1, deadline_s=120)
    for own_session in (False, True):
        group.call(0, "start_child", own_session=own_session)
    token = os.environ["RAY_AUTH_TOKEN"]
    if sys.argv[1] == "kill":
        sys.stdout.write(f"{token}\n")
        sys.stdout.flush()
        asyncio.run(asyncio.Event().wait())
    group.close()
    left = [pid for pid in marked_processes(token) if pid != os.getpid()]
    sys.stdout.write(f"left {left}\n")


if __name__ == "__main__":
    main()
