"""Every listening socket is in docs/guides/security.md.

Other tests check further processes:
packages/rl-rollout/tests/test_engines_vllm_tensor_parallel.py checks vLLM's workers, test_async_real_kills.py checks
learner ranks and roles in separate processes, and test_ray_listeners.py checks Ray.
"""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from async_runs import async_training
from documented_listeners import documented, listening_sockets, undocumented
from tiny_run import make_tiny_run
from train_process import TrainProcess

from rl_core.weights.broadcast import BroadcastTransport
from rl_metrics.report.server import ReportServer

SHORT = {"trainer__steps": 1, "trainer__validate_every": 0, "trainer__validate_first": False}


def test_a_socket_that_is_not_in_the_table_is_found() -> None:
    before = undocumented([os.getpid()])
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = set(undocumented([os.getpid()])) - set(before)
        assert f"port={server.getsockname()[1]}" in found
    with socket.create_server(("0.0.0.0", 0)):
        as_trainer = {os.getpid(): "rl-sync-trainer train"}
        assert any("0.0.0.0" in one for one in undocumented([os.getpid()], played=as_trainer))
    listed = documented()
    assert listed
    assert all(processes and addresses for processes, addresses in listed)


def test_the_servers_of_one_process(tmp_path: Path) -> None:
    """Check the broadcast transport, the gateway, and `serve`."""
    pytest.importorskip("starlette")
    from gateway_site import gateway_site

    run = Path(__file__).parent / "recordings" / "healthy_0"
    before = listening_sockets([os.getpid()])
    transport = BroadcastTransport()
    report = ReportServer([run])

    async def look() -> tuple[int, list[str]]:
        async with gateway_site(lambda _: "3"):
            found = listening_sockets([os.getpid()]) - before
            played = {os.getpid(): "rl-sync-trainer train"}
            return len(found), undocumented([os.getpid()], played=played)

    try:
        assert asyncio.run(look()) == (3, [])
        played = {os.getpid(): "rl-metrics serve"}
        assert undocumented([os.getpid()], played=played) == []
    finally:
        report.close()
        transport.close()
    assert listening_sockets([os.getpid()]) <= before


@pytest.mark.soak
def test_everything_that_an_asynchronous_run_starts(tmp_path: Path) -> None:
    """Run roles, a vLLM engine and two ranks in separate processes, with weights over TCP, beside `serve`."""
    pytest.importorskip("vllm")
    run = make_tiny_run(tmp_path)
    settings = {
        "rollout__engine": "vllm",
        "rollout__placement": "process",
        "weights__transport": "tcp",
        "policy__backend": "megatron",
        "parallel__ranks": 2,
        "cluster__placement": "process",
        "reward__timeout_s": None,
        **SHORT,
    }
    with async_training(run, hold_after=20, **settings) as process:
        process.wait_until((run.folder / "held").exists, "the hold")
        serve = TrainProcess(
            ["serve", str(run.run_folder)], output=tmp_path / "serve.txt", environment={}, module="rl_metrics"
        )
        try:
            serve.wait_until(lambda: listening_sockets([serve.pid]), "a port of serve")
            pids = [process.pid, *process.children(), serve.pid, *serve.children()]
            assert len(listening_sockets(pids)) > 5
            assert undocumented(pids) == []
        finally:
            serve.end()
        (run.folder / "released").touch()
        assert process.wait() == 0, process.text
