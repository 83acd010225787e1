"""Tokens outside a policy's vocabulary are refused in the caller; the error names them."""

import re
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
from rl_distill.objectives import supervised_objective
from rl_distill.options import LearnerOptions, ParallelOptions

OPTIONS = LearnerOptions(num_threads=1)


def with_experts(batch: Batch, values: np.ndarray) -> Batch:
    return batch.with_columns({"routed_experts": Ragged(values, batch.ragged("input_ids").offsets)})


def test_a_token_outside_the_vocabulary_is_named(tied_policy: Path, make_batch: Callable[..., Batch]):
    batch = make_batch((3, 4))
    values = batch.ragged("input_ids").values.copy()
    values[4] = 400
    bad = batch.with_columns({"input_ids": Ragged(values, batch.ragged("input_ids").offsets)})

    with pytest.raises(ShapeError, match=r"in \[0, 39\], the policy's vocabulary; row 1 has 400"):
        MegatronLearner(tied_policy, OPTIONS).logprobs(bad)


def test_experts_that_do_not_fit_are_refused(tied_policy: Path, mixture_policy: Path, make_batch: Callable[..., Batch]):
    batch = make_batch((3, 4))

    with pytest.raises(ShapeError, match="this policy is dense"):
        MegatronLearner(tied_policy, OPTIONS).logprobs(with_experts(batch, np.zeros((7, 2, 2), np.int16)))
    with pytest.raises(ShapeError, match=r"must have \[2, 2\] \(layers, top_k\).*found \[2, 3\]"):
        MegatronLearner(mixture_policy, OPTIONS).logprobs(with_experts(batch, np.zeros((7, 2, 3), np.int16)))


def test_experts_that_no_router_chooses_are_refused(mixture_policy: Path, make_batch: Callable[..., Batch]):
    learner, batch = MegatronLearner(mixture_policy, OPTIONS), make_batch((3, 4))
    values = np.full((7, 2, 2), [3, 0], dtype=np.int16)
    values[2], values[6, 0] = -1, -1  # unknown experts: all layers of one token, and one layer of another
    learner.logprobs(with_experts(batch, values))
    asks = "2 different experts from 0 to 3 .* or all -1 if unknown"

    for wrong in ([1, 1], [-1, 0], [2, -1], [0, 4], [-2, 1], [-2, -2], [9, 9], [32767, -32768]):
        values[4, 1] = wrong
        found = re.escape(f"row 1, token 1, layer 1 has {wrong}")
        with pytest.raises(ShapeError, match=f"{asks}.*; {found}"):
            learner.logprobs(with_experts(batch, values))
    with pytest.raises(ShapeError, match=asks):
        learner.train_step(with_experts(batch, values), supervised_objective)
    assert learner.step == 0


def test_hostile_columns_of_experts_are_refused(make_batch: Callable[..., Batch]):
    batch, good = make_batch((3, 4)), np.full((7, 2, 2), [3, 0], dtype=np.int16)
    for values in (np.full(good.shape, np.nan), good + 0.5, good.astype(int) + 70_000, good > 0, good.astype(object)):
        with pytest.raises(ShapeError, match="must be an array of int16"):
            with_experts(batch, values)
    for offsets in ([0, 4, 7], [0, 7, 7]):
        with pytest.raises(ShapeError, match=r"row 0 of column 'routed_experts' must be as long as in 'input_ids', 3"):
            batch.with_columns({"routed_experts": Ragged(good, np.array(offsets))})
    with pytest.raises(ShapeError, match="must have 2 rows; found 1"):
        batch.with_columns({"routed_experts": Ragged(good, np.array([0, 7]))})
    assert with_experts(batch, good.astype(np.float64))["routed_experts"].dtype == np.int16


def test_weights_of_tokens_that_do_not_train_are_refused(tied_policy: Path, make_batch: Callable[..., Batch]):
    batch = make_batch((3, 4))
    mask = batch.ragged("loss_mask")
    none = batch.with_columns({"loss_mask": Ragged(np.zeros_like(mask.values), mask.offsets)})
    learner = MegatronLearner(tied_policy, OPTIONS)
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}

    with pytest.raises(ShapeError, match=r"must be 0 where loss_mask is False; found .* first in row 0"):
        learner.train_step(none, supervised_objective)

    assert learner.step == 0
    assert before
    after = learner.export_weights()
    assert [name for name in before if not np.array_equal(before[name], after[name])] == []


def test_a_reference_is_offloaded_too(tied_policy: Path, make_batch: Callable[..., Batch]):
    reference = MegatronReference(tied_policy, OPTIONS)
    expected = reference.logprobs(make_batch((3, 4)))

    assert reference.offload() == 0  # on a CPU only gradients can be freed
    assert np.array_equal(reference.logprobs(make_batch((3, 4))).values, expected.values)


def test_ranks_in_one_process_are_refused():
    with pytest.raises(SettingsError, match="must have one rank; found 2"):
        LearnerRanks(ParallelOptions(ranks=2), cluster=ClusterOptions(kind="inline"))


def test_public_names_of_the_objectives_exist():
    assert [name for name in rl_distill.objectives.__all__ if not hasattr(rl_distill.objectives, name)] == []
