"""Gradient sums and weight gathers that overlap with the passes: all bits are equal, and nobody reads stale weights.

The sum of two numbers has the same bits in either order, so no group that sums has more than two ranks here.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from rearranged_ranks import RearrangedHost
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import WeightProofError
from rl_core.weights import (
    Canary,
    ProofTolerances,
    TokenScores,
    WeightReceipt,
    WeightUpdate,
    digest_tensors,
    publish_weights,
)
from rl_core.weights.transports import TensorTransport
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.megatron import overlap
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
Started = Any  # `Started` of conftest.py
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12, 4, 6)
# A distributed optimizer sums the norm in another order; without clipping, weights do not depend on the norm.
PLAIN = LearnerOptions(learning_rate=1e-2, weight_decay=0.1, micro_batch_tokens=24, num_threads=1, clip_grad=0.0)
SUMS = replace(PLAIN, overlap_grad_reduce=True)
GATHERS = replace(SUMS, overlap_param_gather=True)
SHARED = ParallelOptions(ranks=2, distributed_optimizer=True)

TWO_STAGES = ParallelOptions(ranks=4, pipeline=2, distributed_optimizer=True)
DENSE, MIXTURE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
CASES: dict[str, tuple[str, ParallelOptions, LearnerOptions, LoraOptions]] = {
    "sums": (DENSE, ParallelOptions(ranks=2), SUMS, LoraOptions()),
    "adapter": (DENSE, SHARED, replace(GATHERS, dtype="bfloat16"), LoraOptions(rank=2)),
    "shared experts": (
        MIXTURE,
        ParallelOptions(ranks=4, tensor=2, sequence=True, expert=2, expert_tensor=1, distributed_optimizer=True),
        replace(GATHERS, recompute="selective", recompute_modules=("layernorm", "moe")),
        LoraOptions(),
    ),
    "interleaved": (DENSE, replace(TWO_STAGES, virtual_pipeline=2), GATHERS, LoraOptions()),
}
OTHERS: dict[str, tuple[str, ParallelOptions, LearnerOptions, LoraOptions]] = {
    "bfloat16": (DENSE, SHARED, replace(GATHERS, dtype="bfloat16"), LoraOptions()),
    "whole experts": (MIXTURE, SHARED, GATHERS, LoraOptions()),
    "experts in two stages": (MIXTURE, TWO_STAGES, replace(GATHERS, recompute="full"), LoraOptions()),
    "tensor": (DENSE, ParallelOptions(ranks=4, tensor=2, distributed_optimizer=True), GATHERS, LoraOptions()),
    "context": (DENSE, ParallelOptions(ranks=2, context=2, distributed_optimizer=True), GATHERS, LoraOptions()),
}


@pytest.fixture(scope="module")
def policies(policy_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {n: policy_writer(tmp_path_factory.mktemp(n), n, num_hidden_layers=4) for n in (DENSE, MIXTURE)}


def broken(batch: Batch) -> Batch:
    weights = batch.ragged("loss_weights")
    values = weights.values.copy()
    values[5] = np.nan
    return batch.with_columns({"loss_weights": Ragged(values, weights.offsets)})


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def test_no_bit_changes(
    case: str,
    policies: dict[str, Path],
    make_batch: MakeBatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
):
    architecture, layout, options, lora = {**CASES, **OTHERS}[case]
    ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[layout.ranks]).in_layout(layout)
    without = replace(options, overlap_grad_reduce=False, overlap_param_gather=False)
    plain, learner = (
        MegatronLearner(policies[architecture], of, ranks=ranks, name=name, lora=lora)
        for name, of in (("plain", without), ("overlapping", options))
    )

    def step(batch: Batch, *, is_applied: bool = True) -> None:
        wanted, found = (x.train_step(batch, supervised_objective) for x in (plain, learner))
        assert found.is_applied is is_applied
        assert (found.loss == wanted.loss) is is_applied

    batch = make_batch(LENGTHS)
    step(make_batch((9,)))  # some ranks have no rows
    step(batch)  # gathers the weights of the step before
    step(broken(batch), is_applied=False)
    learner.offload()
    step(batch)
    expected, scores = (x.logprobs(batch).values for x in (plain, learner))
    assert scores.tolist() == expected.tolist()
    step(batch)
    wanted = plain.export_weights()
    for name, tensor in learner.export_weights().items():
        assert torch.equal(tensor, wanted[name]), name
    step(batch)
    learner.save(tmp_path / "saved")
    plain.load(tmp_path / "saved")
    step(batch)


def test_collectives_of_a_group_run_one_after_another(two_ranks: Started):
    # Two threads of torch's gloo groups that end their collectives at once corrupt the heap.
    ranks = two_ranks.in_layout(SHARED)
    assert ranks.call_all(RearrangedHost.ends_in_order) == [True, True]


class Engine:
    """An engine that serves a policy with transformers."""

    def __init__(self, policy_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32, trust_remote_code=False)

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.model.load_state_dict(update.location.tensors, strict=False)  # the head is tied to the embedding
        live = {name: parameter.detach() for name, parameter in self.model.named_parameters(remove_duplicate=False)}
        arrived, served = digest_tensors(update.location.tensors), digest_tensors(live)
        return WeightReceipt(
            version=update.version,
            arrived={name: digest.checksum for name, digest in arrived.items()},
            live={name: digest.probe for name, digest in served.items()},
        )

    async def score(self, sequences: Sequence[np.ndarray], *, with_experts: bool = False) -> list[TokenScores]:
        return [self._score(torch.from_numpy(sequence).long()) for sequence in sequences]

    @torch.no_grad()
    def _score(self, ids: Tensor) -> TokenScores:
        logprobs = self.model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
        return TokenScores.after_first(ids[1:, None].numpy(), logprobs.numpy())


def publish(learner: MegatronLearner, engine: Engine, batch: Batch) -> None:
    """Publish weights like a trainer: first the weights, then the logprobs of a canary, then the proof of both."""
    update = TensorTransport().pack(learner.export_weights(), version=1, tied=learner.tied)
    sequences = [np.asarray(row, np.int32) for row in batch.ragged("input_ids")]
    canary = Canary(sequences=sequences, logprobs=[np.asarray(row) for row in learner.logprobs(batch)])
    asyncio.run(publish_weights(update, [engine], canary=canary, tolerances=ProofTolerances()))


def test_the_proof_finds_weights_that_were_exported_before_they_were_gathered(
    two_ranks: Started, tied_policy: Path, make_batch: MakeBatch
):
    ranks, batch = two_ranks.in_layout(SHARED), make_batch((7, 5, 9, 12))
    plain, learner, stale = (
        MegatronLearner(tied_policy, options, ranks=ranks, name=name)
        for name, options in (("plain", PLAIN), ("overlapping", GATHERS), ("stale", GATHERS))
    )
    ranks.call_all(RearrangedHost.read_stale, "stale")
    for _ in range(3):
        losses = [x.train_step(batch, supervised_objective).loss for x in (plain, learner, stale)]
        assert losses == losses[:1] * 3

    publish(learner, Engine(tied_policy), batch)
    with pytest.raises(WeightProofError, match="canary"):
        publish(stale, Engine(tied_policy), batch)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("has_copies", [True, False])
def test_buckets_are_summed_within_the_last_backward_pass(
    has_copies: bool, mixture_policy: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []

    class Copies:
        """A process group of the model's copies."""

        def size(self) -> int:
            return 2 if has_copies else 1

    def note(kind: type, method: str) -> None:
        call = getattr(kind, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append(method)
            return call(*args, **kwargs)

        monkeypatch.setattr(kind, method, noted)

    monkeypatch.setattr(overlap, "group_of_copies", lambda **_: Copies())
    note(_ParamAndGradBucketGroup, "start_grad_sync")
    note(DistributedDataParallel, "finish_grad_sync")
    learner = MegatronLearner(mixture_policy, SUMS)
    batch = make_batch(LENGTHS)
    learner.train_step(batch, supervised_objective)  # megatron counts the gradients of each parameter in the first step
    seen.clear()

    def objective(logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        seen.append("micro-batch")
        return supervised_objective(logprobs, entropy, micro)

    learner.train_step(batch, objective)

    learner.close()
    finished = seen.index("finish_grad_sync")
    last = finished - 1 - seen[:finished][::-1].index("micro-batch")
    assert seen[:last] == ["micro-batch"] * last
    assert last > 1
    num_sums = seen[last:finished].count("start_grad_sync")
    assert (num_sums > 5) is has_copies
    assert (seen[finished:].count("start_grad_sync") == 0) is has_copies
