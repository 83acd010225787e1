"""Roles on Ray: the conformance suite, and checks specific to Ray."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster_conformance import RemoteClusterConformance
from ray_role_owner import processes_with

from rl_core.cluster import ClusterOptions, open_cluster
from rl_core.cluster.ray.session import RayOptions, start_ray, stop_ray
from rl_core.errors import MissingExtraError
from rl_core.testing import wait_until

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(scope="module", autouse=True)
def ray():
    yield start_ray(RayOptions(num_cpus=2, object_store_bytes=300 << 20))
    stop_ray()


class TestRay(RemoteClusterConformance):
    @classmethod
    def make_options(cls, **changes):
        return ClusterOptions(kind="ray", **changes)

    def test_arguments_for_all_are_stored_once(self, ray, monkeypatch):
        puts, put = [], ray.put
        monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
        value = np.arange(1_000_000)
        found = self.run(self.group.call_all("echo", value))
        assert len(puts) == 1
        assert found
        assert all((one == value).all() and not one.flags.writeable for one in found)
        tensors = self.run(self.group.call_all("echo", torch.ones(100_000)))
        assert [float((tensor + 1).sum()) for tensor in tensors] == [200_000.0] * 3
        tensors[0] += 1  # a copy; writing into Ray's memory would crash the process


def test_roles_on_several_nodes_one_of_which_is_killed():
    """Run in a separate process, because a process joins one Ray cluster at a time."""
    command = [sys.executable, SUPPORT / "ray_role_nodes.py"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    words = ("refused", "nodes", "afar", "stacks", "process", "node", "moved", "gone")
    assert [line for line in found.stdout.splitlines() if line.split(" ")[0] in words] == [
        "refused SettingsError enough for 3 3",
        "refused SettingsError enough for 2 3",
        "refused SettingsError enough for 6 3",
        "nodes 3 3",
        "afar True",
        "stacks True True True",
        "process True True",
        "node True True 1",
        "moved ['hello you!', 'hello you!', 'hello you!'] [2]",
        "gone True",
    ]


def fresh_environment():
    """Return the environment without this test's token: the script starts a Ray whose own token marks its processes."""
    return {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}


def test_a_ray_that_was_started_for_roles_ends_with_them():
    command = [sys.executable, SUPPORT / "ray_role_owner.py", "close"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=fresh_environment())
    assert (found.returncode, found.stdout, found.stderr) == (0, "left []\n", "")


def test_nothing_is_left_when_the_process_that_started_it_is_killed():
    command = [sys.executable, SUPPORT / "ray_role_owner.py", "kill"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=fresh_environment()) as owner:
        try:
            token = owner.stdout.readline().strip()
            assert len(processes_with(token)) > 4  # Ray, the actor, its two children
        finally:
            owner.kill()
    wait_until(lambda: not processes_with(token), "Ray, the role and its children to end", deadline_s=60)


def test_missing_ray_is_said_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"rl-core\[ray\]"):
        open_cluster(ClusterOptions(kind="ray"))
