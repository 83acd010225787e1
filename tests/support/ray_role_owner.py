"""Start Ray and a role with children in a process that is then killed, or close everything, depending on argv."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from rl_core.cluster import BlockingGroup, ClusterOptions, RoleSpec
from rl_core.cluster.ray.session import RayOptions


def processes_with(token):
    """Return other processes of this host that have a Ray cluster's token."""
    if len(token) < 64:
        raise ValueError(f"this is no token: {token!r}")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if f"RAY_AUTH_TOKEN={token}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


SPEC = RoleSpec(name="echo", factory="cluster_conformance.role:EchoRole")


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
    sys.stdout.write(f"left {processes_with(token)}\n")


if __name__ == "__main__":
    main()
