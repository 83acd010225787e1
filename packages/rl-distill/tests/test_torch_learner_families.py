"""The reference learner on every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from rounding import rounding_bound
from safetensors.torch import load_file
from torch_learner import TorchLearner
from transformers import AutoModelForCausalLM

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import SettingsError
from rl_distill.architecture.policy_config import read_policy_config
from rl_distill.checkpoints.hf_folder import WEIGHTS_FILE
from rl_distill.learner import LearnerOptions
from rl_distill.objectives import supervised_objective

MakeBatch = Callable[..., Batch]


def test_logprobs_are_those_of_transformers(family_policy: Path, make_batch: MakeBatch):
    batch = make_batch((6, 2, 9, 1))
    model = AutoModelForCausalLM.from_pretrained(family_policy, trust_remote_code=False)

    found = TorchLearner(family_policy, LearnerOptions()).logprobs(batch)

    for ids, row in zip(batch.ragged("input_ids"), found, strict=True):
        tokens = torch.from_numpy(ids.astype("int64"))
        distribution = model(tokens[None]).logits[0].log_softmax(-1)
        expected = distribution[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
        torch.testing.assert_close(torch.from_numpy(row[1:].copy()), expected.detach(), rtol=0, atol=1e-5)


def test_weights_go_by_the_names_of_the_folder(family_policy: Path):
    stored = load_file(family_policy / WEIGHTS_FILE)

    weights = TorchLearner(family_policy, LearnerOptions()).export_weights()

    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())


@pytest.fixture(scope="session", params=["Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"])
def routed_policy(
    request: pytest.FixtureRequest, policy_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return policy_writer(tmp_path_factory.mktemp("routed"), request.param)


def test_gradients_of_experts_are_those_of_transformers(routed_policy: Path, make_batch: MakeBatch):
    batch = make_batch((7, 5))
    learner = TorchLearner(routed_policy, LearnerOptions())
    reference = AutoModelForCausalLM.from_pretrained(routed_policy, trust_remote_code=False)
    loss = torch.zeros(())
    for ids, weights in zip(batch.ragged("input_ids"), batch.ragged("loss_weights"), strict=True):
        tokens = torch.from_numpy(ids.astype("int64"))
        logprobs = reference(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        loss = loss - (logprobs * torch.from_numpy(weights[1:].copy())).sum()
    loss.backward()
    expected = torch.stack([parameter.grad.norm() for parameter in reference.parameters()]).norm()

    result = learner.train_step(batch, supervised_objective)

    assert result.loss == pytest.approx(loss.item(), rel=rounding_bound(1.0))
    assert result.grad_norm == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_goes_on_from_its_checkpoint(
    dtype: Literal["float32", "bfloat16"], routed_policy: Path, make_batch: MakeBatch, tmp_path: Path
):
    batch, options = make_batch((7, 5)), LearnerOptions(learning_rate=1e-2, dtype=dtype)
    learner, resumed = TorchLearner(routed_policy, options), TorchLearner(routed_policy, options)
    learner.train_step(batch, supervised_objective)
    learner.save(tmp_path / "checkpoint")

    resumed.load(tmp_path / "checkpoint")

    for one in (learner, resumed):
        one.train_step(batch, supervised_objective)
    left, right = learner.export_weights(), resumed.export_weights()
    assert different_tensors(left, right) == []


def test_random_weights_come_from_the_seed(family_policy: Path):
    config = read_policy_config(family_policy)
    first, same, other = (TorchLearner(config, LearnerOptions(seed=seed)).export_weights() for seed in (1, 1, 2))

    assert different_tensors(first, same) == []
    name = next(name for name in first if "down_proj" in name)
    assert not torch.equal(first[name], other[name])
    assert first[name].std() == pytest.approx(config["initializer_range"], rel=0.2)


def test_chosen_experts_are_refused(mixture_policy: Path, make_batch: MakeBatch):
    batch = make_batch((3, 2))
    experts = Ragged(np.zeros((5, 2, 2), dtype=np.int16), np.array([0, 3, 5]))

    with pytest.raises(SettingsError, match="cannot replay the column 'routed_experts'"):
        TorchLearner(mixture_policy, LearnerOptions()).logprobs(batch.with_columns({"routed_experts": experts}))
