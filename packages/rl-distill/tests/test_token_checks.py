"""Tokens that a policy cannot have are refused by the caller, by name."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rl_distill.objectives
from rl_core.cluster import ClusterOptions
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import SettingsError, ShapeError
from rl_distill.megatron.learner import MegatronLearner, MegatronReference
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import LearnerOptions, ParallelOptions
from rl_distill.supervised import supervised_objective

OPTIONS = LearnerOptions(num_threads=1)


def with_experts(batch: Batch, shape: tuple[int, int], value: int) -> Batch:
    ids = batch.ragged("input_ids")
    return batch.with_columns(
        {"routed_experts": Ragged(np.full((len(ids.values), *shape), value, np.int16), ids.offsets)}
    )


def test_a_token_outside_the_vocabulary_is_named(tied_policy: Path, make_batch: Callable[..., Batch]):
    batch = make_batch((3, 4))
    values = batch.ragged("input_ids").values.copy()
    values[4] = 400
    bad = batch.with_columns({"input_ids": Ragged(values, batch.ragged("input_ids").offsets)})

    with pytest.raises(ShapeError, match=r"from 0 to 39, the policy's vocabulary; row 1 has 400"):
        MegatronLearner(tied_policy, OPTIONS).logprobs(bad)


def test_experts_that_do_not_fit_are_refused(tied_policy: Path, mixture_policy: Path, make_batch: Callable[..., Batch]):
    batch = make_batch((3, 4))
    mixture = MegatronLearner(mixture_policy, OPTIONS)

    with pytest.raises(ShapeError, match="this policy is dense"):
        MegatronLearner(tied_policy, OPTIONS).logprobs(with_experts(batch, (2, 2), 0))
    with pytest.raises(ShapeError, match=r"must have \[2, 2\] \(layers, top_k\).*found \[2, 3\]"):
        mixture.logprobs(with_experts(batch, (2, 3), 0))
    with pytest.raises(ShapeError, match="must be below 4, or -1 where nothing is known; row 0 has 9"):
        mixture.logprobs(with_experts(batch, (2, 2), 9))


def test_weights_of_tokens_that_do_not_train_are_refused(tied_policy: Path, make_batch: Callable[..., Batch]):
    batch = make_batch((3, 4))
    mask = batch.ragged("loss_mask")
    none = batch.with_columns({"loss_mask": Ragged(np.zeros_like(mask.values), mask.offsets)})
    learner = MegatronLearner(tied_policy, OPTIONS)
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}

    with pytest.raises(ShapeError, match="loss_weights that are not 0 where loss_mask is False, first in row 0"):
        learner.train_step(none, supervised_objective)

    assert learner.step == 0
    assert all(np.array_equal(before[name], tensor) for name, tensor in learner.export_weights().items())


def test_a_reference_is_offloaded_too(tied_policy: Path, make_batch: Callable[..., Batch]):
    reference = MegatronReference(tied_policy, OPTIONS)
    expected = reference.logprobs(make_batch((3, 4)))

    assert reference.offload() == 0  # on a CPU there is nothing to free but gradients
    assert np.array_equal(reference.logprobs(make_batch((3, 4))).values, expected.values)


def test_ranks_in_one_process_are_refused():
    with pytest.raises(SettingsError, match="2 ranks wait for one another, and one process cannot"):
        LearnerRanks(ParallelOptions(ranks=2), cluster=ClusterOptions(kind="inline"))


def test_public_names_of_the_objectives_exist():
    assert [name for name in rl_distill.objectives.__all__ if not hasattr(rl_distill.objectives, name)] == []
