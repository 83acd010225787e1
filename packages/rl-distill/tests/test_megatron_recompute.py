"""Parts of layers recomputed in the backward pass: the same results with less memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_kernels import install_cpu_kernels
from rounding import rounding_bound
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import SettingsError
from rl_distill.learner import MetricSums, MicroBatch, StepResult
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner, MegatronReference
from rl_distill.objectives import supervised_objective
from rl_distill.options import LearnerOptions, LoraOptions

MakeBatch = Callable[..., Batch]
LENGTHS = (14, 9, 22, 5, 17)
OPTIONS = LearnerOptions(learning_rate=1e-2, micro_batch_tokens=128, num_threads=1)
NUM_EXPERTS, TOP_K, NUM_LAYERS = 4, 2, 2

DENSE = [("core_attn",), ("layernorm",), ("mlp",), ("core_attn", "layernorm", "mlp")]
MIXTURE = [("core_attn",), ("layernorm",), ("moe",), ("core_attn", "layernorm", "moe")]


class Kept:
    """Records the storages that autograd saves in the forward pass of a step."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def objective(self, logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        """Train with supervised learning; count the saved bytes between the passes, when freed storages are empty."""
        self.num_bytes = sum(storage.nbytes() for storage in self._storages.values())
        return supervised_objective(logprobs, entropy, micro)


def step_of(learner: MegatronLearner, batch: Batch) -> tuple[StepResult, int]:
    """Return a step's result, and the bytes that autograd saved, including the weights."""
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        result = learner.train_step(batch, kept.objective)
    return result, kept.num_bytes


def with_experts(batch: Batch) -> Batch:
    """Add random experts to most tokens, as from an engine."""
    ids, random = batch.ragged("input_ids"), np.random.default_rng(5)
    chosen = random.random((len(ids.values), NUM_LAYERS, NUM_EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int16)
    chosen[::7] = -1
    return batch.with_columns({"routed_experts": Ragged(chosen, ids.offsets)})


def check_same(
    policy: Path,
    batch: Batch,
    modules: tuple[str, ...],
    options: LearnerOptions = OPTIONS,
    lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
) -> None:
    selective = replace(options, recompute="selective", recompute_modules=modules)
    plain, learner = (MegatronLearner(policy, of, lora=lora) for of in (options, selective))
    for _ in range(2):
        (wanted, most), (found, fewer) = (step_of(x, batch) for x in (plain, learner))
        assert 0 < fewer < most
        if options.kernels == "fused":  # without gradients, torch's norm on a CPU rounds differently
            assert (found.loss, found.grad_norm) == pytest.approx(
                (wanted.loss, wanted.grad_norm), rel=rounding_bound(1.0)
            )
        else:
            assert (found.loss, found.grad_norm, found.metrics) == (wanted.loss, wanted.grad_norm, wanted.metrics)
    np.testing.assert_allclose(learner.logprobs(batch).values, plain.logprobs(batch).values, rtol=0, atol=1e-5)
    plain.close()
    learner.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("modules", DENSE, ids=" ".join)
def test_a_dense_policy_learns_the_same_and_keeps_less(
    modules: tuple[str, ...], tied_policy: Path, make_batch: MakeBatch
):
    check_same(tied_policy, make_batch(LENGTHS, num_prompts=2), modules)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("modules", MIXTURE, ids=" ".join)
def test_a_mixture_replays_the_same_experts_and_keeps_less(
    modules: tuple[str, ...], mixture_policy: Path, make_batch: MakeBatch
):
    check_same(mixture_policy, with_experts(make_batch(LENGTHS)), modules)


@pytest.mark.usefixtures("one_rank", "uncompiled")
def test_a_gpus_kernels_are_computed_again(tied_policy: Path, mixture_policy: Path, make_batch: MakeBatch):
    install_cpu_kernels()
    fused = replace(OPTIONS, kernels="fused")
    check_same(tied_policy, make_batch(LENGTHS, num_prompts=2), DENSE[-1], fused)
    check_same(mixture_policy, with_experts(make_batch(LENGTHS)), MIXTURE[-1], fused)


@pytest.mark.usefixtures("one_rank")
def test_an_adapter_draws_the_same(tied_policy: Path, make_batch: MakeBatch):
    check_same(tied_policy, make_batch(LENGTHS), ("layernorm", "mlp"), lora=LoraOptions(rank=2, dropout=0.3))


@pytest.mark.usefixtures("one_rank")
def test_what_has_nothing_to_compute_again_is_refused(tied_policy: Path):
    options = replace(OPTIONS, recompute="selective", recompute_modules=("moe",))
    for kind in (MegatronLearner, MegatronCritic):
        with pytest.raises(SettingsError, match="no layer of this policy has a mixture of experts"):
            kind(tied_policy, options)
    MegatronReference(tied_policy, options).close()
