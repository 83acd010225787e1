"""vLLM serves models of many architectures live: each update is proven, whatever the names in the engine are."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, SERVED_IN_CI, STATEFUL, UNSERVED, make_family

from rl_core import Batch, Ragged, RowKey
from rl_core.errors import RLError
from rl_core.weights import Canary, ProofTolerances, PublishReport, SharedFileTransport, publish_weights
from rl_distill import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_rollout.engines import ProcessEngine
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions

pytest.importorskip("vllm")

OPTIONS = LearnerOptions(learning_rate=1e-2, micro_batch_tokens=64, weight_decay=0.0, num_threads=1)
SEQUENCES = [np.random.default_rng(length).integers(3, 128, length).astype(np.int32) for length in (12, 5, 21)]


def make_batch() -> Batch:
    ids = Ragged.from_rows(SEQUENCES, dtype="int32")
    weights = np.full(len(ids.values), 1 / len(ids.values), np.float32)
    masks = {"loss_mask": weights > 0, "loss_weights": weights}
    columns = {"input_ids": ids, **{name: Ragged(values, ids.offsets) for name, values in masks.items()}}
    return Batch([RowKey(f"prompt{row}", 0, 0) for row in range(len(SEQUENCES))], columns)


def serve(name: str, folder: Path) -> list[PublishReport]:
    """Start the engine, publish the first weights and those after a step, and return both reports."""
    make_family(name, folder, for_vllm=True)
    learner = MegatronLearner(folder, OPTIONS)
    options = VLLMOptions(
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_gib=0.06,
        enable_prefix_caching=name not in STATEFUL,
        capture_experts=False,
        num_threads=1,
    )

    async def publish() -> list[PublishReport]:
        # vLLM runs transformers' classes only in a process that has started no other engine
        engine = VLLMEngine(folder, options) if name in SERVED_IN_CI else ProcessEngine("vllm", folder, options)
        transport, batch, reports = SharedFileTransport(), make_batch(), []
        try:
            await engine.start()
            for version in (1, 2):
                weights = {one: tensor.clone() for one, tensor in learner.export_weights().items()}
                update = transport.pack(weights, version=version, tied=learner.tied)
                canary = Canary(sequences=SEQUENCES, logprobs=list(learner.logprobs(batch)))
                report = await publish_weights(update, [engine], canary=canary, tolerances=ProofTolerances())
                reports.append(report)
                learner.train_step(batch, supervised_objective)
        finally:
            await engine.close()
            transport.close()
        return reports

    try:
        return asyncio.run(publish())
    finally:
        learner.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SERVED_IN_CI else pytest.mark.soak) for name in FAMILIES]
)
def test_each_update_of_a_family_is_served_and_proven_or_refused(name: str, tmp_path: Path) -> None:
    """A family that vLLM computes in another way is refused before the first step."""
    if name in UNSERVED:
        with pytest.raises(RLError, match=r"use the transformers engine" if name in SERVED_IN_CI else ""):
            serve(name, tmp_path)
        return
    first, second = serve(name, tmp_path)
    assert max(first.canary_max_diff, second.canary_max_diff) <= 4e-5
    assert first.num_tensors == second.num_tensors
    assert first.fingerprint != second.fingerprint
