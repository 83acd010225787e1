"""Ray's listening sockets are in docs/guides/security.md, and only this user can read its folder."""

import os
import stat
from pathlib import Path

from documented_listeners import listening_sockets, undocumented

from rl_core.cluster.processes.guard import descendants
from rl_core.cluster.ray.session import start_ray


def test_every_socket_of_ray_is_documented_and_its_folder_private() -> None:
    ray = start_ray()

    @ray.remote
    class Worker:
        def pid(self) -> int:
            return os.getpid()

    worker = Worker.remote()
    assert ray.get(worker.pid.remote()) != os.getpid()
    pids = [os.getpid(), *(pid for pid, _ in descendants(os.getpid()))]
    sockets = listening_sockets(pids)
    assert len(sockets) > 5
    assert undocumented(pids, played={os.getpid(): "rl-sync-trainer train"}) == []
    local = [Path(one.address) for one in sockets if one.kind == "unix" and "rl-ray-" in one.address]
    assert local
    for path in local:
        folder = next(parent for parent in path.parents if parent.name.startswith("rl-ray-"))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    ray.kill(worker)
