"""The transformers engine serves a learner's adapter, separate or merged into its base, as peft computes it."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_core.data import FloatArray
from rl_core.weights import Canary, ProofTolerances, SharedFileTransport, WeightUpdate, publish_weights
from rl_distill.learner import LearnerOptions
from rl_distill.learners import Learners
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.options import LoraOptions
from rl_rollout.engines.transformers import TransformersEngine, TransformersOptions
from rl_rollout.testing import make_tiny_model

Serving = Literal["adapter", "merged"]
SEQUENCE = np.arange(2, 26, dtype=np.int32)


class Adapted:
    """A learner that starts from a peft adapter with random A and B matrices."""

    def __init__(self, folder: Path) -> None:
        self.base = make_tiny_model(folder / "base", is_tied=True)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32, trust_remote_code=False)
        config = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules="all-linear", init_lora_weights=False)
        theirs: Any = get_peft_model(model, config)
        theirs.save_pretrained(folder / "adapter")
        lora = LoraOptions(rank=4, alpha=6, rslora=True, path=folder / "adapter")
        learner = MegatronLearner(self.base, LearnerOptions(num_threads=1), lora=lora)
        self.learners = Learners(policy=learner, reference=None, critic=None, close=lambda: None, lora=lora)
        self.logprobs = said(theirs)
        self.merged = theirs.merge_and_unload()

    def pack(self, transport: SharedFileTransport, *, serving: Serving) -> WeightUpdate:
        self.learners = replace(self.learners, lora=replace(self.learners.lora, serving=serving))
        return self.learners.pack(transport, version=3)


def said(model: Any) -> FloatArray:
    """Return the [T] logprobs of the sequence's tokens."""
    ids = torch.from_numpy(SEQUENCE.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1)
    own: FloatArray = logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate([[0.0], own]).astype(np.float32)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    adapted = Adapted(tmp_path_factory.mktemp("adapted"))
    yield adapted
    adapted.learners.policy.close()


@pytest.mark.parametrize(("serving", "room"), [("adapter", 4), ("merged", 0), ("merged", 4)])
def test_an_engine_serves_what_peft_computes(serving: Serving, room: int, adapted: Adapted) -> None:
    """Merged weights equal peft's, and need no room for adapters in the engine."""
    transport = SharedFileTransport()
    engine = TransformersEngine(adapted.base, TransformersOptions(max_lora_rank=room))
    canary = Canary(sequences=[SEQUENCE], logprobs=[adapted.logprobs])

    async def serve() -> FloatArray:
        await engine.start()
        update = adapted.pack(transport, serving=serving)
        assert (update.adapter is not None) == (serving == "adapter")
        if update.adapter is None:
            theirs = adapted.merged.state_dict()
            for name, tensor in load_file(update.location.file).items():
                torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)
        await publish_weights(update, [engine], canary=canary, tolerances=ProofTolerances(canary=1e-5))
        (scores,) = await engine.score([SEQUENCE])
        await engine.close()
        return scores.token_logprobs

    np.testing.assert_allclose(asyncio.run(serve()), adapted.logprobs, rtol=0, atol=1e-5)
    transport.close()
