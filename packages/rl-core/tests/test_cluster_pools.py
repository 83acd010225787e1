"""CPUs and GPUs of this machine: counting, fractional shares, and assignment to processes."""

import asyncio
from pathlib import Path

import pytest

from rl_core.cluster import ClusterOptions, ResourcePool, RoleSpec, open_cluster
from rl_core.cluster.shares import Shares, count_room, describe_shares, machine_shares, visible_gpus
from rl_core.errors import SettingsError

ECHO = "cluster_conformance.role:EchoRole"
START_S = 60.0


def echo(name="echo", **options):
    return RoleSpec(name=name, factory=ECHO, **options)


def test_parts_are_taken_and_given_back():
    shares = Shares(2.0, {"a": 1.0, "b": 1.0})
    first = shares.take(0.5, 0.5)
    assert (first.cpus, first.gpus) == (0.5, {"a": 0.5})
    second = shares.take(0, 0.25)
    assert second.gpus == {"a": 0.25}  # shares the GPU already in use, so that the other stays whole
    assert shares.take(0, 1).gpus == {"b": 1.0}
    assert shares.take(0, 0.5) is None
    assert shares.take(2.0, 0) is None
    shares.give_back(first)
    shares.give_back(second)
    assert (shares.free_cpus, shares.free_gpus) == (2.0, {"a": 1.0, "b": 0.0})


def test_several_gpus_are_whole_ones():
    shares = Shares(0.0, {"a": 1.0, "b": 1.0, "c": 1.0})
    shares.take(0, 0.1)
    assert shares.take(0, 2).gpus == {"b": 1.0, "c": 1.0}
    assert shares.take(0, 1) is None


@pytest.mark.parametrize(("cpus", "gpus", "room"), [(0.1, 0, 20), (0, 0.3, 6), (1, 1, 2), (0, 0, 100), (3, 0, 0)])
def test_room_is_counted_without_taking_it(cpus, gpus, room):
    shares = Shares(2.0, {"a": 1.0, "b": 1.0})
    assert count_room(shares, cpus, gpus, at_most=100) == room
    assert shares.free_gpus == {"a": 1.0, "b": 1.0}
    assert shares.free_cpus == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("variable", "devices"), [("", []), ("-1", []), ("2", ["2"]), ("3, 1", ["3", "1"]), ("0,-1,1", ["0"])]
)
def test_visible_gpus_are_those_that_cuda_would_see(monkeypatch, variable, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == devices


def test_without_the_variable_the_driver_s_devices_count(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = [Path("/dev/nvidia3"), Path("/dev/nvidia7")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: found if pattern == "nvidia[0-9]*" else [])
    assert visible_gpus() == ["0", "1"]  # CUDA numbers the visible devices from 0


def test_a_device_named_twice_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,1")
    with pytest.raises(SettingsError, match="lists device 1 twice"):
        machine_shares()


def test_amounts_in_words():
    assert describe_shares(1, 2) == "1 CPU and 2 GPUs"
    assert describe_shares(0.5, 1) == "0.5 CPUs and 1 GPU"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size of ResourcePool.* of at least 1; found 0"),
        ({"cpus": -1}, "cpus of ResourcePool.* of at least 0; found -1"),
        ({"cpus": float("nan")}, "cpus of ResourcePool.* of at least 0; found nan"),
        ({"gpus": float("inf")}, "gpus of ResourcePool.* a finite number of at least 0; found inf"),
        ({"gpus": 1.5}, "whole number of GPUs, or a fraction of one; found 1.5"),
        ({"strategy": "near"}, "'strict_spread'; found 'near'"),
    ],
)
def test_impossible_pools_are_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        ResourcePool(**{"name": "learners", "size": 1, **change})


def test_an_impossible_request_of_a_role_is_refused():
    with pytest.raises(SettingsError, match="role 'echo' must request a whole number"):
        echo(gpus=2.5)


def devices_of(work):
    """Return CUDA_VISIBLE_DEVICES of each role that `work` starts in a cluster of processes."""

    async def run():
        async with open_cluster(ClusterOptions()) as cluster:
            roles = [role for group in await work(cluster) for role in group]
            return [await role.call("environment", "CUDA_VISIBLE_DEVICES") for role in roles]

    return asyncio.run(run())


@pytest.mark.one_python("it starts six processes to read one variable")
def test_each_process_sees_its_own_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")

    async def work(cluster):
        shared = ResourcePool(name="shared", size=2, gpus=1)
        return [
            await cluster.start_group(echo("learner", gpus=0.5), size=2, pool=shared, deadline_s=START_S),
            await cluster.start_group(echo("engine", gpus=0.5), size=2, pool=shared, deadline_s=START_S),
            await cluster.start_group(echo("teacher", gpus=2), size=1, deadline_s=START_S),
            await cluster.start_group(echo("reward"), size=1, deadline_s=START_S),
        ]

    assert devices_of(work) == ["4", "5", "4", "5", "6,7", "4,5,6,7"]


def test_a_role_of_a_pool_without_gpus_sees_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")

    async def work(cluster):
        pool = ResourcePool(name="cpus", size=1)
        return [await cluster.start_group(echo(), size=1, pool=pool, deadline_s=START_S)]

    assert devices_of(work) == [""]


def test_gpus_of_a_pool_and_of_the_user_contradict_each_other(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    spec = echo(gpus=1, environment={"CUDA_VISIBLE_DEVICES": "4"})

    async def work(cluster):
        return [await cluster.start_group(spec, size=1, deadline_s=START_S)]

    with pytest.raises(SettingsError, match="'echo' requests GPUs, but its environment sets CUDA_VISIBLE_DEVICES"):
        devices_of(work)
