"""A Megatron learner replays the experts of a bfloat16 mixture in vLLM: mismatch, and the canary of the proof."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors

from rl_core import Batch, Ragged, RowKey
from rl_core.data import IntArray
from rl_core.errors import WeightProofError
from rl_core.weights import Canary, ProofTolerances, PublishReport, TensorTransport, publish_weights
from rl_distill.learner import LearnerOptions
from rl_distill.learners import Learners
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_metrics.reductions import Recorder
from rl_rollout.engines import GenerateRequest, ReplicatedEngine, SamplingParams
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_trainer_parts.learning.step import record_replay
from rl_trainer_parts.settings.schema import MetricSettings

pytest.importorskip("vllm")

NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 8, 6, 24
LEARNER = LearnerOptions(dtype="bfloat16", learning_rate=1e-3, micro_batch_tokens=1024, num_threads=1)
TOLERANCES = ProofTolerances(probe=3e-2, canary=0.15)
"""Half of the default for bfloat16; without replay the canary's difference is several times as large."""


class Mixture(NamedTuple):
    folder: Path
    learners: Learners
    engine: ReplicatedEngine
    canaries: list[IntArray]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixture]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture")
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.08,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    policy = MegatronLearner(folder, LEARNER)
    options = VLLMOptions(max_model_len=96, max_num_seqs=64, kv_cache_gib=0.02, num_threads=1, dtype="bfloat16")
    engine = ReplicatedEngine([VLLMEngine(folder, options)])
    asyncio.run(engine.start())
    canaries = [np.random.default_rng(length).integers(2, 64, length).astype(np.int32) for length in (30, 50, 23, 64)]
    yield Mixture(folder, Learners(policy=policy, reference=None, critic=None, close=policy.close), engine, canaries)
    asyncio.run(engine.close())
    policy.close()


def rollouts(engine: ReplicatedEngine) -> Batch:
    """Return responses with their experts, as a learner gets them from the queue."""

    async def generate() -> Any:
        prompts = [np.random.default_rng(index).integers(2, 64, 12).astype(np.int32) for index in range(NUM_PROMPTS)]
        requests = [
            GenerateRequest(
                input_ids=prompt,
                sampling=SamplingParams(max_tokens=NUM_TOKENS, seed=100 * index),
                num_samples=NUM_SAMPLES,
            )
            for index, prompt in enumerate(prompts)
        ]
        return requests, await asyncio.gather(*map(engine.generate, requests))

    requests, groups = asyncio.run(generate())
    rows = [(r.input_ids, one) for r, group in zip(requests, groups, strict=True) for one in group]
    ids = Ragged.from_rows([np.concatenate([prompt, one.token_ids]) for prompt, one in rows], dtype="int32")
    logprobs = np.concatenate([np.concatenate([np.zeros(len(p), np.float32), one.logprobs]) for p, one in rows])
    mask = np.concatenate([np.arange(len(p) + len(one.token_ids)) >= len(p) for p, one in rows])
    columns = {
        "input_ids": ids,
        "rollout_logprobs": Ragged(logprobs, ids.offsets),
        "loss_mask": Ragged(mask, ids.offsets),
        "loss_weights": Ragged(mask.astype(np.float32) / mask.sum(), ids.offsets),
        "routed_experts": Ragged(np.concatenate([one.routed_experts for _, one in rows]), ids.offsets),
    }
    return Batch([RowKey(f"p{index // NUM_SAMPLES}", index % NUM_SAMPLES, 0) for index in range(len(rows))], columns)


def mismatch(policy: Any, batch: Batch) -> dict[str, float]:
    """Return the metrics that a run records of a batch before its first step."""
    metrics = MetricSettings(details_every=1, replay_rows=len(batch))
    settings = SimpleNamespace(metrics=metrics, rollout=SimpleNamespace(temperature=1.0))
    recorder = Recorder(strict=True)
    parts: Any = SimpleNamespace(settings=settings, learners=SimpleNamespace(policy=policy))
    record_replay(parts, batch, recorder, step=1)
    return dict(recorder.reduce())


def test_replay_divides_the_mismatch_of_a_bfloat16_mixture_by_ten(mixture: Mixture) -> None:
    batch = rollouts(mixture.engine)
    found = mismatch(mixture.learners.policy, batch)
    assert found["router/k3_kl/no_replay"] >= 10 * found["router/k3_kl/replay"]
    assert found["router/logprobs_diff_mean/no_replay"] > 2 * found["router/logprobs_diff_mean/replay"]


def published(mixture: Mixture, *, version: int, replays: bool) -> tuple[Canary, PublishReport]:
    """Publish the learner's weights to the engine; return the canary and the report."""
    learners, tolerances = mixture.learners, ProofTolerances(probe=TOLERANCES.probe, canary=np.inf)
    canary = learners.canary(mixture.canaries, replays=replays)
    update = TensorTransport().pack(learners.policy.export_weights(), version=version, tied=learners.policy.tied)
    return canary, asyncio.run(publish_weights(update, [mixture.engine], canary=canary, tolerances=tolerances))


def test_updates_of_a_bfloat16_mixture_are_proven_with_the_experts_of_the_engine(mixture: Mixture) -> None:
    learners, batch = mixture.learners, rollouts(mixture.engine)
    for version in (1, 2, 3):
        step = learners.policy.train_step(batch, supervised_objective)
        if version == 1:  # later, the rollouts are from older weights
            assert 0.0 < step.metrics["router/rerouted_share"] < 0.1
        assert step.metrics["router/unknown_share"] == 0.0
        canary, report = published(mixture, version=version, replays=True)
        (told,) = report.canary_scores
        assert [one.routed_experts.min() for one in told] == [0] * len(mixture.canaries), "all tokens have experts"
        assert learners.proven(canary, report, tolerances=TOLERANCES).canary_max_diff < TOLERANCES.canary
    alone = learners.canary(mixture.canaries)
    off = [np.abs(told.token_logprobs - logprobs).max() for told, logprobs in zip(told, alone.logprobs, strict=True)]
    assert max(off) > TOLERANCES.canary, "without replay this canary proves nothing"
    swapped = [told[1].routed_experts[:30], *(one.routed_experts for one in told[1:])]
    scores = [replace(one, routed_experts=experts) for one, experts in zip(told, swapped, strict=True)]
    with pytest.raises(WeightProofError, match="canary sequence 0"):
        learners.proven(canary, replace(report, canary_scores=(scores,)), tolerances=TOLERANCES)


def test_canaries_are_scored_with_their_experts_amid_other_requests(mixture: Mixture) -> None:
    async def ask() -> Any:
        request = GenerateRequest(
            input_ids=mixture.canaries[0], sampling=SamplingParams(max_tokens=NUM_TOKENS, seed=1), num_samples=8
        )
        running = asyncio.ensure_future(mixture.engine.generate(request))
        await asyncio.sleep(0)
        scored = await mixture.engine.score(mixture.canaries, with_experts=True)
        return scored, await mixture.engine.score(mixture.canaries), await running

    told, scored, samples = asyncio.run(ask())
    proven = mixture.learners._canary_logprobs(mixture.canaries, [one.routed_experts for one in told])
    for one, alone, expected in zip(told, scored, proven, strict=True):
        assert np.abs(one.token_logprobs - expected).max() < TOLERANCES.canary
        assert one.logprobs.shape == alone.logprobs.shape
    for sample in samples:
        assert (sample.routed_experts[:-1] >= 0).all()


def test_a_sample_that_is_scored_twice_changes_no_step(mixture: Mixture) -> None:
    batch = rollouts(mixture.engine).select(np.arange(NUM_SAMPLES))
    weights = []
    for is_measured in (True, False):
        learner = MegatronLearner(mixture.folder, LEARNER)
        for _ in range(2):
            if is_measured:
                mismatch(learner, batch)
            learner.train_step(batch, supervised_objective)
        weights.append({name: tensor.clone() for name, tensor in learner.export_weights().items()})
        learner.close()
    assert different_tensors(weights[1], weights[0]) == []
