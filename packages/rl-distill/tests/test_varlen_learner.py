"""Learners with GPU kernels compared with those of a CPU: scores, three steps, and weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_kernels import install_cpu_kernels

from rl_core.data import Batch, Ragged
from rl_distill.learner import LearnerOptions, MetricSums, MicroBatch
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner

OPTIONS = LearnerOptions(
    learning_rate=1e-3, micro_batch_tokens=24, num_threads=1, eps=1e-6, shared_prefix_tokens=1, kernels="plain"
)
KINDS = ("fused", "plain")
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12, 4, 6)


pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(autouse=True)
def _kernels():
    install_cpu_kernels()


def policy_gradient(
    logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch
) -> tuple[torch.Tensor, MetricSums]:
    weights = micro.columns["loss_weights"]
    loss = -(logprobs.exp() * micro.columns["advantages"] * weights).sum()
    return (loss if entropy is None else loss - 0.1 * (entropy * weights).sum()), {}


def squared_error(values: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, MetricSums]:
    return ((values - micro.columns["advantages"]).square() * micro.columns["loss_weights"]).sum(), {}


@pytest.mark.parametrize(
    ("architecture", "num_groups", "num_prompts", "recompute"),
    [
        ("Qwen3ForCausalLM", 2, None, {}),
        ("Qwen2ForCausalLM", 1, 2, {}),
        ("LlamaForCausalLM", 4, 2, {"recompute": "selective", "recompute_modules": ("core_attn",)}),
    ],
)
def test_steps_are_the_same(
    architecture: str,
    num_groups: int,
    num_prompts: int | None,
    recompute: dict[str, Any],
    policy_writer: Callable[..., Path],
    tmp_path: Path,
    make_batch: Callable[..., Batch],
):
    policy = policy_writer(tmp_path, architecture, num_key_value_heads=num_groups)
    fused = MegatronLearner(policy, replace(OPTIONS, kernels="fused", **recompute))
    plain = MegatronLearner(policy, OPTIONS)
    for step in range(3):
        batch = make_batch(LENGTHS, seed=step, num_prompts=num_prompts)
        scores = [learner.logprobs(batch).values for learner in (fused, plain)]
        np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)
        found, expected = (x.train_step(batch, policy_gradient, with_entropy=True) for x in (fused, plain))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert found.computed_tokens == expected.computed_tokens
    weights = fused.export_weights()
    for name, tensor in plain.export_weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)


def test_a_critic_in_bfloat16_trains(tied_policy: Path, make_batch: Callable[..., Batch]):
    options = replace(OPTIONS, dtype="bfloat16")
    fused, plain = (MegatronCritic(tied_policy, replace(options, kernels=name)) for name in ("fused", "plain"))
    for step in range(2):
        batch = make_batch(LENGTHS, seed=step, num_prompts=2)
        found, expected = (critic.train_step(batch, squared_error) for critic in (fused, plain))
        assert found.loss == pytest.approx(expected.loss, rel=1e-2)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=3e-2)


@pytest.mark.parametrize("policy", ["tied_policy", "mixture_policy"])
def test_micro_batches_without_a_trained_token_are_the_same(
    policy: str, make_batch: Callable[..., Batch], request: pytest.FixtureRequest
):
    folder = request.getfixturevalue(policy)
    fused, plain = (MegatronLearner(folder, replace(OPTIONS, micro_batch_tokens=8, kernels=k)) for k in KINDS)
    ones = make_batch((1, 1))
    np.testing.assert_array_equal(fused.logprobs(ones).values, plain.logprobs(ones).values)
    batch = make_batch((8, 8, 8))
    trained = batch.ragged("loss_mask")
    mask = Ragged(trained.values & (np.arange(len(trained.values)) >= 8), trained.offsets)
    weights = Ragged(batch.ragged("loss_weights").values * mask.values, mask.offsets)
    untrained = batch.with_columns({"loss_mask": mask, "loss_weights": weights})
    found, expected = (x.train_step(untrained, policy_gradient) for x in (fused, plain))
    assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
