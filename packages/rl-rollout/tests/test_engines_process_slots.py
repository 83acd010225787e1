"""Several adapters at once in engines of other processes, and in replicas."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_slots import RANK, Clients, check_interleaved_requests_equal_each_alone, check_slots_are_limited_and_freed

from rl_core.errors import WeightProofError
from rl_core.weights import (
    AdapterUpdate,
    Canary,
    ProofTolerances,
    TensorTransport,
    WeightReceipt,
    WeightUpdate,
    digest_tensors,
)
from rl_rollout.engines import EnginePlacement, ProcessEngine, ReplicatedEngine, ScriptedEngine, TransformersOptions
from rl_rollout.engines.scripted import DEFAULT_TRAITS, honest_receipt


def run_replicas(
    model_dir: Path, folder: Path, work: Callable[[Clients, list[ProcessEngine]], Awaitable[None]]
) -> None:
    """Run something with two replicas in their own processes."""
    options = TransformersOptions(max_model_len=128, max_lora_rank=RANK, max_adapters=2)
    host = EnginePlacement(environment={"OMP_NUM_THREADS": "1"}, max_restarts=3)

    async def run() -> None:
        engines = [ProcessEngine("transformers", model_dir, options, host=host, index=index) for index in range(2)]
        engine = ReplicatedEngine(engines)
        try:
            await engine.start()
            await work(Clients(engine, model_dir, folder), engines)
        finally:
            await engine.close()

    asyncio.run(run())


def test_replicas_serve_several_adapters_and_restarts_get_all(tied_model_dir: Path, tmp_path: Path) -> None:
    async def work(clients: Clients, engines: list[ProcessEngine]) -> None:
        await check_interleaved_requests_equal_each_alone(clients)
        await clients.drop_all()
        await check_slots_are_limited_and_freed(clients)
        await clients.publish("c", version=9, seed=1)
        os.kill(engines[0].pid, signal.SIGKILL)
        while engines[0].state == "serving":
            await asyncio.sleep(0.01)
        while engines[0].state != "serving":
            await asyncio.sleep(0.01)
        os.kill(engines[1].pid, signal.SIGKILL)
        for name, version, seed in (("b", 2, 0), ("c", 9, 1), ("base", 0, 0)):
            samples = await clients.engine.generate(clients.request(name, seed=3))
            clients.check(samples, name, 3, {version: seed})

    run_replicas(tied_model_dir, tmp_path, work)


def an_update(name: str, version: int) -> WeightUpdate:
    tensors = {"base_model.model.q.lora_A.weight": torch.full((1, 2), float(version))}
    told = AdapterUpdate(rank=1, base=digest_tensors({"q.weight": torch.zeros(2, 2)}), name=name)
    return TensorTransport().pack(tensors, version=version, tied={}, adapter=told)


def test_a_replica_whose_proof_fails_continues_to_serve_the_others() -> None:
    """The adapter that failed is dropped; the replica needs no weights again."""
    dropped: list[str] = []
    is_broken = False

    def receive(update: WeightUpdate) -> WeightReceipt:
        receipt = honest_receipt(update)
        assert update.adapter is not None
        if not is_broken:
            return receipt
        return WeightReceipt(version=update.version, arrived=receipt.arrived, live=receipt.live, problems=("broken.",))

    class Slots(ScriptedEngine):
        async def drop_adapter(self, name: str) -> None:
            dropped.append(name)

    engine = Slots({(5,): [[6, 7]]}, receive=receive, traits=replace(DEFAULT_TRAITS, max_lora_rank=1))
    canary = Canary(sequences=[np.array([1, 2], np.int32)], logprobs=None)

    async def publish(replicas: ReplicatedEngine, name: str, version: int) -> Any:
        return await replicas.publish(an_update(name, version), canary=canary, tolerances=ProofTolerances())

    async def work() -> None:
        nonlocal is_broken
        replicas = ReplicatedEngine([engine])
        await replicas.start()
        await publish(replicas, "b", 1)
        is_broken = True
        with pytest.raises(WeightProofError, match=r"broken\."):
            await publish(replicas, "a", 2)
        assert dropped == ["a"]
        await replicas.score([np.array([5, 6], np.int32)])
        assert [update.version for update in engine.updates] == [1, 2]
        is_broken = False
        await publish(replicas, "a", 2)
        await replicas.drop_adapter("b")
        await replicas.score([np.array([5, 6], np.int32)])
        assert dropped == ["a", "b"]
        assert [update.version for update in engine.updates] == [1, 2, 2]
        await replicas.close()

    asyncio.run(work())
