"""The router bias of GLM: float32 in a policy of any dtype, preserved by training, checkpoints and learners."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from safetensors.torch import load_file
from torch_learner import TorchLearner

from rl_core.data.batch import Batch
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.checkpoints.checkpoint import STATE_FOLDER, state_shapes
from rl_distill.checkpoints.pieces import TensorFolder
from rl_distill.learner import LearnerOptions
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner
from rl_distill.objectives import supervised_objective

MakeBatch = Callable[..., Batch]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
LENGTHS = (7, 5, 9)


@pytest.fixture(scope="module")
def policy(policy_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_writer(tmp_path_factory.mktemp("glm"), "Glm4MoeForCausalLM")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_is_kept_to_the_bit(
    dtype: Literal["float32", "bfloat16"], policy: Path, make_batch: MakeBatch, tmp_path: Path
):
    options = LearnerOptions(learning_rate=1e-2, weight_decay=0.1, dtype=dtype, num_threads=1)
    learner, stored = MegatronLearner(policy, options), load_file(policy / "model.safetensors")
    assert stored[BIAS].ne(stored[BIAS].bfloat16()).any(), "a bias that bfloat16 holds says nothing"
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}

    learner.train_step(make_batch(LENGTHS), supervised_objective)
    learner.save(tmp_path / "saved")
    after = learner.export_weights()
    logprobs = learner.logprobs(make_batch(LENGTHS)).values

    assert {name for name, tensor in after.items() if torch.equal(tensor, before[name])} == {BIAS}
    for found in (after, load_file(tmp_path / "saved" / "policy" / "model.safetensors")):
        assert torch.equal(found[BIAS], stored[BIAS])
        assert {str(tensor.dtype) for name, tensor in found.items() if name != BIAS} == {f"torch.{dtype}"}
    shapes = TensorFolder(tmp_path / "saved" / STATE_FOLDER).shapes()
    config = parse_policy_config(read_policy_config(policy))
    assert shapes.keys() == state_shapes(tensor_shapes(config), config).keys()
    assert [name for name in shapes if name.endswith(BIAS)] == [f"weights/{BIAS}"]
    for kind in (MegatronLearner, TorchLearner):
        other = kind(read_policy_config(policy), options)  # random weights, biases of 0
        other.load(tmp_path / "saved")
        assert different_tensors(after, other.export_weights()) == []
        tolerance = 0.0 if kind is MegatronLearner else 1e-5 if dtype == "float32" else 0.3
        np.testing.assert_allclose(other.logprobs(make_batch(LENGTHS)).values, logprobs, rtol=0, atol=tolerance)


def test_both_learners_train_alike(policy: Path, make_batch: MakeBatch):
    options = LearnerOptions(learning_rate=1e-3, num_threads=1)
    learners = [MegatronLearner(policy, options), TorchLearner(policy, options)]
    for seed in range(3):
        found, expected = (one.train_step(make_batch(LENGTHS, seed=seed), supervised_objective) for one in learners)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_a_critic_has_the_bias_too(policy: Path, make_batch: MakeBatch):
    critic = MegatronCritic(policy, LearnerOptions(num_threads=1))

    critic.train_step(make_batch(LENGTHS), lambda values, _: (values.square().sum() + values.sum(), {}))

    assert torch.equal(critic.export_weights()[BIAS], load_file(policy / "model.safetensors")[BIAS])
