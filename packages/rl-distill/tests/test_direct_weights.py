"""Weights sent directly from a learner's ranks: their content, and when engines may load them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offered_weights import OfferedTo, assert_offered

from rl_core.data.batch import Batch
from rl_core.errors import WeightsGoneError
from rl_core.weights.broadcast import DirectTransport, SenderOptions
from rl_distill.learners import Learners
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
Started = Any  # `Started` of conftest.py
OPTIONS = LearnerOptions(learning_rate=1e-2, num_threads=1, micro_batch_tokens=64)
TP2 = ParallelOptions(ranks=2, tensor=2)
SENDER = SenderOptions(bucket_bytes=3000, deadline_s=20.0)


def test_weights_are_withdrawn_before_they_change_and_offered_anew(
    two_ranks: Started, tied_policy: Path, make_batch: MakeBatch
) -> None:
    learner = MegatronLearner(tied_policy, OPTIONS, ranks=two_ranks.in_layout(TP2))
    engine = OfferedTo()
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
    old = learner.offer_weights(SENDER, version=1)
    learner.logprobs(make_batch((4, 5)))  # leaves the weights unchanged
    assert_offered(engine.take(old)[0], old, before)
    learner.train_step(make_batch((4, 5)), supervised_objective)
    with pytest.raises(WeightsGoneError, match=r"rank 0 of the learner: .* 1 were requested; the sender has none"):
        engine.take(old)
    new = learner.offer_weights(SENDER, version=2)
    (found,) = engine.take(new)
    assert_offered(found, new, learner.export_weights())
    assert new.fingerprint != old.fingerprint
    assert not torch.equal(found["model.norm.weight"], before["model.norm.weight"])
    engine.close()
    learner.close()


def test_an_adapter_travels_merged_or_by_itself(two_ranks: Started, tied_policy: Path, make_batch: MakeBatch) -> None:
    lora = LoraOptions(rank=2)
    policy = MegatronLearner(tied_policy, OPTIONS, ranks=two_ranks.in_layout(TP2), lora=lora)
    policy.train_step(make_batch((4, 5)), supervised_objective)
    transport, engine = DirectTransport(SENDER), OfferedTo()
    for serving in ("merged", "adapter"):
        learners = Learners(
            policy=policy, reference=None, critic=None, close=lambda: None, lora=replace(lora, serving=serving)
        )
        update = learners.pack(transport, version=3)
        learners.expect_engines(transport, 2)
        (found,) = engine.take(update)
        if serving == "merged":
            assert len(update.sources) == 2
            assert_offered(found, update, policy.export_weights())
        else:
            assert len(update.sources) == 1
            expected = policy.export_adapter()
            assert {name: tensor.tolist() for name, tensor in found.items()} == {
                name: tensor.tolist() for name, tensor in expected.items()
            }
    engine.close()
    transport.close()
    policy.close()
