"""Weights to engines on GPUs, with proof. Run with `nox -s gpu`; NCCL needs two GPUs and vLLM."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from offered_weights import TwoRanks

from rl_core.errors import EngineError, WeightProofError
from rl_core.weights import (
    InProcess,
    ProofTolerances,
    SharedBuckets,
    TensorTransport,
    check_receipt,
    digest_tensors,
    publish_weights,
    tensor_checksum,
)
from rl_core.weights.broadcast import BroadcastTransport, SenderOptions
from rl_core.weights.ipc import IpcTransport, opened
from rl_rollout.engines.options import TransformersOptions, VLLMOptions
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.engines.transformers import TransformersEngine
from rl_rollout.testing import generate, make_tiny_model
from rl_rollout.testing.reference_model import TIED_HEAD, canary_of, perturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; nox -s gpu needs its GPU build"),
]

TOLERANCES = ProofTolerances(probe=1e-3, canary=1e-2)
ON_GPU = TransformersOptions(device="cuda", max_model_len=128)
SEQUENCE = np.arange(2, 12, dtype=np.int32)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", is_tied=True)


@pytest.fixture
def weights(model_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model_dir / "model.safetensors")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for the ranks and one for the engine")
def test_an_engine_on_another_gpu_puts_together_what_two_ranks_hold(
    model_dir: Path, weights: dict[str, torch.Tensor]
) -> None:
    """Two senders in this process have separate communicators; no weights pass through the host."""
    host = EnginePlacement(environment={"CUDA_VISIBLE_DEVICES": "1"}, deadline_s=300)
    engine = ProcessEngine("transformers", model_dir, ON_GPU, host=host)
    ranks = TwoRanks(SenderOptions(backend="nccl", bucket_bytes=100_000))
    asyncio.run(engine.start())
    try:
        for version in (1, 2):
            sent = {name: tensor.cuda() for name, tensor in perturbed(weights, scale=0.02 * version).items()}
            update = ranks.pack(sent, version=version, tied=TIED_HEAD)
            receipt = asyncio.run(engine.update_weights(update))
            check_receipt(update, receipt, tolerances=TOLERANCES)
            assert set(generate(engine)[0].policy_versions.tolist()) == {version}
    finally:
        asyncio.run(engine.close())
        ranks.end()


@pytest.fixture
def hosted(model_dir: Path) -> Iterator[ProcessEngine]:
    engine = ProcessEngine("transformers", model_dir, ON_GPU, host=EnginePlacement(deadline_s=300))
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
def test_sums_on_the_gpu_are_those_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (0,), (3, 5), (4097,), (1031, 1021), (3, 700, 1999)):
        tensor = torch.randn(shape, generator=generator).mul(9).to(dtype)
        views = [tensor] if tensor.ndim < 2 else [tensor, tensor.transpose(0, -1), tensor[1:, ::2]]
        for view in views:
            assert tensor_checksum(view.cuda(), "sums") == tensor_checksum(view, "sums")
            on_gpu = tensor.cuda()
            assert tensor_checksum(on_gpu) == tensor_checksum(tensor, "sums")


def test_a_proof_waits_for_the_gpu_once_and_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{index}.weight": torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16) for index in range(8)}
    digest_tensors(tensors)  # fill the cached tables first
    transfers: list[int] = []
    to_cpu = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        transfers.append(tensor.nbytes)
        return to_cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    digests = digest_tensors(tensors)
    assert len(transfers) == 1
    assert {digest.kind for digest in digests.values()} == {"sums"}
    assert torch.cuda.max_memory_allocated() - before < 4 * tensors["0.weight"].nbytes


def test_an_engine_of_this_process_proves_weights_on_the_gpu(model_dir: Path, weights: dict[str, torch.Tensor]) -> None:
    engine = TransformersEngine(model_dir, ON_GPU)
    asyncio.run(engine.start())
    new = perturbed(weights, scale=0.05)
    update = TensorTransport().pack(on_gpu(new), version=1, tied=TIED_HEAD)
    assert {digest.kind for digest in update.digests.values()} == {"sums"}
    canary = canary_of(model_dir, new, SEQUENCE)
    report = asyncio.run(publish_weights(update, [engine], canary=canary, tolerances=TOLERANCES))
    assert report.version == 1
    name = "model.layers.0.mlp.up_proj.weight"
    damaged = update.location.tensors[name].clone()
    damaged.view(torch.int32)[3, 5] ^= 1
    receipt = asyncio.run(
        engine.update_weights(replace(update, location=InProcess(tensors={**update.location.tensors, name: damaged})))
    )
    with pytest.raises(WeightProofError, match="was changed in transit") as raised:
        check_receipt(update, receipt, tolerances=TOLERANCES)
    assert raised.value.tensor == name
    asyncio.run(engine.close())


def test_an_engine_in_another_process_opens_weights_on_the_gpu(
    hosted: ProcessEngine, model_dir: Path, weights: dict[str, torch.Tensor]
) -> None:
    transport = IpcTransport(bucket_bytes=100_000, keeps=False)
    before = torch.cuda.memory_allocated()
    for version in (1, 2):
        new = perturbed(weights, scale=0.02 * version)
        canary = canary_of(model_dir, new, SEQUENCE)
        update = transport.pack(on_gpu(new), version=version, tied=TIED_HEAD)
        assert isinstance(update.location, SharedBuckets)
        assert len(update.location.buckets) > 1
        report = asyncio.run(publish_weights(update, [hosted], canary=canary, tolerances=TOLERANCES))
        assert report.version == version
        assert set(generate(hosted)[0].policy_versions.tolist()) == {version}
        transport.release()
        assert torch.cuda.memory_allocated() <= before + 2**20
    with pytest.raises(EngineError, match="cannot be opened"):
        asyncio.run(hosted.update_weights(update))
    transport.close()


def test_memory_comes_back_also_where_the_engine_died(hosted: ProcessEngine, weights: dict[str, torch.Tensor]) -> None:
    transport = IpcTransport()
    before = torch.cuda.memory_allocated()
    update = transport.pack(on_gpu(weights), version=1, tied=TIED_HEAD)
    asyncio.run(hosted.update_weights(update))
    os.kill(hosted.pid, signal.SIGKILL)
    transport.close()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_weights_of_another_gpu_are_refused(weights: dict[str, torch.Tensor]) -> None:
    transport = IpcTransport()
    update = transport.pack(on_gpu(weights), version=1, tied=TIED_HEAD)
    assert isinstance(update.location, SharedBuckets)
    elsewhere = replace(update, location=replace(update.location, device="GPU-0"))
    with pytest.raises(EngineError, match="memory of GPU-0; this process sees"), opened(elsewhere):
        pass
    transport.close()


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_serves_as_before_once_it_has_weights(
    level: int, model_dir: Path, weights: dict[str, torch.Tensor]
) -> None:
    engine = TransformersEngine(model_dir, ON_GPU)
    asyncio.run(engine.start())
    before, held = generate(engine, num_samples=2, seed=4), torch.cuda.memory_allocated()
    asyncio.run(engine.sleep(1 if level == 1 else 2))
    assert torch.cuda.memory_allocated() <= held - sum(tensor.nbytes for tensor in weights.values()) // 2
    asyncio.run(engine.wake())
    if level == 2:
        update = TensorTransport().pack(on_gpu(weights), version=0, tied=TIED_HEAD)
        receipt = asyncio.run(engine.update_weights(update))
        assert check_receipt(update, receipt, tolerances=TOLERANCES) < 1e-5
    for first, second in zip(before, generate(engine, num_samples=2, seed=4), strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
    asyncio.run(engine.close())


@needs_vllm
def test_vllm_sleeps_without_its_weights_and_is_proven_again(model_dir: Path, weights: dict[str, torch.Tensor]) -> None:
    options = VLLMOptions(max_model_len=128, gpu_memory_utilization=0.2, can_sleep=True)
    engine = ProcessEngine("vllm", model_dir, options, host=EnginePlacement(deadline_s=300))
    asyncio.run(engine.start())
    transport = IpcTransport()
    canary = canary_of(model_dir, weights, SEQUENCE)
    try:
        for version in (1, 2):
            update = transport.pack(on_gpu(weights), version=version, tied=TIED_HEAD)
            asyncio.run(publish_weights(update, [engine], canary=canary, tolerances=TOLERANCES))
            asyncio.run(engine.sleep(2))
            asyncio.run(engine.wake())
    finally:
        asyncio.run(engine.close())
        transport.close()


@needs_vllm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for the sender and one for the engine")
def test_an_engine_on_another_gpu_serves_what_nccl_brought(model_dir: Path, weights: dict[str, torch.Tensor]) -> None:
    options = VLLMOptions(max_model_len=128, gpu_memory_utilization=0.2)
    host = EnginePlacement(environment={"CUDA_VISIBLE_DEVICES": "1"}, deadline_s=300)
    engine = ProcessEngine("vllm", model_dir, options, host=host)
    transport = BroadcastTransport(backend="nccl", bucket_bytes=100_000)
    asyncio.run(engine.start())
    try:
        for version in (1, 2):
            sent = on_gpu(perturbed(weights, scale=0.02 * version))
            update = transport.pack(sent, version=version, tied=TIED_HEAD)
            receipt = asyncio.run(engine.update_weights(update))
            check_receipt(update, receipt, tolerances=ProofTolerances(probe=1e-3))
            assert set(generate(engine)[0].policy_versions.tolist()) == {version}
    finally:
        asyncio.run(engine.close())
        transport.close()


def on_gpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}
