"""Weights from one GPU to an engine on another, over NCCL. Run with `nox -s gpu` on two GPUs."""

import asyncio
from pathlib import Path

import pytest
import torch

from rl_core.weights.broadcast import BroadcastTransport
from rl_core.weights.publish import ProofTolerances, check_receipt
from rl_rollout.engines.options import VLLMOptions
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.testing import generate, make_tiny_model
from rl_rollout.testing.reference_model import TIED_HEAD, perturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for the sender and one for the engine"),
]


def test_an_engine_on_another_gpu_serves_what_nccl_brought(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model_dir = make_tiny_model(tmp_path / "model", is_tied=True)
    options = VLLMOptions(max_model_len=128, gpu_memory_utilization=0.2)
    host = EnginePlacement(environment={"CUDA_VISIBLE_DEVICES": "1"}, deadline_s=300)
    engine = ProcessEngine("vllm", model_dir, options, host=host)
    transport = BroadcastTransport(backend="nccl", bucket_bytes=100_000)
    weights = load_file(model_dir / "model.safetensors")
    asyncio.run(engine.start())
    try:
        for version in (1, 2):
            sent = {name: tensor.cuda() for name, tensor in perturbed(weights, scale=0.02 * version).items()}
            update = transport.pack(sent, version=version, tied=TIED_HEAD)
            receipt = asyncio.run(engine.update_weights(update))
            check_receipt(update, receipt, tolerances=ProofTolerances(probe=1e-3))
            assert set(generate(engine)[0].policy_versions.tolist()) == {version}
    finally:
        asyncio.run(engine.close())
        transport.close()
