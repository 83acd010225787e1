"""A Ray that another program has imported or started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = "num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, logging_level='ERROR'"
USE = """
from rl_core import Prompt, RayQueue, TaskSpec
from rl_core.cluster import stop_ray
from rl_core.testing import make_trajectory

queue = RayQueue([TaskSpec(name="train", needs=["input_ids"])])
queue.issue([Prompt(uid="p0", input_ids=[1, 2])], num_sessions=1)
put = ray.remote(num_cpus=1)(lambda queue: queue.put("p0", 0, [make_trajectory("p0", 0)]))
ray.get(put.remote(queue), timeout=60)
queue.ack(queue.lease("train", groups=1, deadline_s=60))
queue.close()
stop_ray()
"""


def run(source: str, home: Path, **environment: str) -> list[str]:
    """Run a program as a stranger would, with no word to Ray but what is given; gives the lines that it prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-W", "error:::rl_core", "-W", "error:Ray runs", "-c", source],
        env={**clean, "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("mode", ["token", pytest.param("disabled", marks=pytest.mark.soak)])
def test_a_ray_that_runs_is_used_with_its_own_authentication_and_left_running(mode: str, tmp_path: Path):
    source = f"""
import os, ray
ray.init({SMALL})
before = ray.get_runtime_context().gcs_address
{USE}
assert ray.is_initialized() and ray.get_runtime_context().gcs_address == before
print(os.environ["RAY_AUTH_MODE"], "RAY_AUTH_TOKEN" in os.environ)

from rl_core.cluster import BlockingGroup, ClusterOptions, RoleSpec
role = RoleSpec(name="late", factory="types:SimpleNamespace")
group = BlockingGroup.start(ClusterOptions(kind="ray"), role, size=1, deadline_s=120)
ray.shutdown()
group.close()
print(ray.is_initialized())
"""
    chosen = {} if mode == "token" else {"RAY_AUTH_MODE": mode}  # Ray's own choice is a token
    assert run(source, tmp_path, **chosen) == [mode, "False", "False"]


def test_a_ray_that_was_only_imported_is_started_with_a_token_on_loopback(tmp_path: Path):
    source = f"""
import os, ray
from rl_core.cluster import RayOptions, start_ray
start_ray(RayOptions(num_cpus=1, object_store_bytes=80 << 20))
host = ray.get_runtime_context().gcs_address.split(":")[0]
print(host, os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"]))
from ray._private.authentication.authentication_utils import is_token_auth_enabled
{USE}
print(is_token_auth_enabled(), ray.is_initialized())
try:
    ray.put("late")
except ray.exceptions.RaySystemError:
    print(ray.is_initialized())
"""
    assert run(source, tmp_path) == ["127.0.0.1", "token", "64", "True", "False", "False"]
    assert not (tmp_path / ".ray").exists()


def test_authentication_that_is_turned_off_is_refused_where_ours_would_start_it(tmp_path: Path):
    source = """
from rl_core.cluster import start_ray
from rl_core.errors import SettingsError
try:
    start_ray()
except SettingsError as error:
    assert "RAY_AUTH_MODE is 'disabled'. Unset it, or call ray.init() yourself first" in str(error), error
    print("refused")
"""
    assert run(source, tmp_path, RAY_AUTH_MODE="disabled") == ["refused"]


@pytest.mark.soak
def test_a_ray_of_this_machine_alone_survives_a_pause(tmp_path: Path):
    """Ray ends a node that misses its health checks; a paused machine must not lose its only one."""
    source = """
import os, signal, time
from pathlib import Path
from rl_core.cluster import RayOptions, start_ray, stop_ray
from rl_core.cluster.processes.guard import running_processes
ray = start_ray(RayOptions(num_cpus=1, object_store_bytes=80 << 20))
add = ray.remote(num_cpus=1)(lambda number: number + 1)
assert ray.get(add.remote(1), timeout=60) == 2
address = ray.get_runtime_context().gcs_address
words = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\\0") for pid in running_processes()}
(raylet,) = [pid for pid, (program, *rest) in words.items() if program.endswith("/raylet") and address in str(rest)]
os.kill(raylet, signal.SIGSTOP)
time.sleep(8)  # the pause, longer than the checks of a cluster of several machines allow
print(*[node["Alive"] for node in ray.nodes()])
os.kill(raylet, signal.SIGCONT)
print(ray.get(add.remote(1), timeout=60))
stop_ray()
"""
    assert run(source, tmp_path) == ["True", "2"]
