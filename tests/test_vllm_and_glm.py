"""GLM mixtures in vLLM and the Megatron learner: shared experts, expert groups, and a bias without gradients."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core import Batch, Ragged, RowKey
from rl_core.errors import WeightProofError
from rl_core.weights import (
    Canary,
    ProofTolerances,
    TensorTransport,
    WeightUpdate,
    check_receipt,
    publish_weights,
)
from rl_core.weights.broadcast import BroadcastTransport
from rl_distill.learner import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_rollout.engines.protocol import GenerateRequest, SamplingParams
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.testing import joined
from rl_rollout.testing.reference_model import perturbed

pytest.importorskip("vllm")

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 3
SEQUENCES = [np.random.default_rng(length).integers(2, 40, length).astype(np.int32) for length in (7, 40, 23, 64)]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


class Served(NamedTuple):
    """A policy, and the engine that serves it.

    Attributes:
        distance: Largest difference from the learner's logprobs when the learner replays the engine's experts.
    """

    dtype: str
    distance: float
    tolerances: ProofTolerances
    folder: Path
    learner: MegatronLearner
    engine: VLLMEngine

    def publish(self, update: WeightUpdate) -> None:
        receipt = asyncio.run(self.engine.update_weights(update))
        check_receipt(update, receipt, tolerances=self.tolerances)

    def on_worker(self, act: Callable[[Any], Any]) -> Any:
        return self.engine._stepper._core.collective_rpc(act)  # type: ignore[union-attr] # vLLM's stepper


DTYPES = (
    ("float32", 1e-4, ProofTolerances(canary=1e-4)),
    pytest.param(("bfloat16", 0.3, ProofTolerances(probe=3e-2, canary=3.0)), marks=pytest.mark.soak),
)


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    dtype, *_ = request.param
    folder = write_policy(tmp_path_factory.mktemp("glm"))
    options = VLLMOptions(max_model_len=96, max_num_seqs=16, kv_cache_gib=0.006, num_threads=1, dtype=dtype)
    learning = LearnerOptions(learning_rate=3e-3, micro_batch_tokens=256, num_threads=1, dtype=dtype)
    learner, engine = MegatronLearner(folder, learning), VLLMEngine(folder, options)
    asyncio.run(engine.start())
    yield Served(*request.param, folder, learner, engine)
    asyncio.run(engine.close())
    learner.close()


def write_policy(folder: Path) -> Path:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=NUM_EXPERTS,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=TOP_K,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.15,
    )
    model = Glm4MoeForCausalLM(config).float()
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.1)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored[f"model.layers.{NUM_LAYERS}.eh_proj.weight"] = torch.ones(2, 2)  # as in GLM's files: predicts further tokens
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def batch_of(rows: list[np.ndarray], **columns: Ragged) -> Batch:
    ids = Ragged.from_rows(rows, dtype="int32")
    ones = np.ones(len(ids.values), np.float32)
    weighed = {
        "loss_mask": Ragged(ones.astype(bool), ids.offsets),
        "loss_weights": Ragged(ones / len(ones), ids.offsets),
    }
    keys = [RowKey(f"{index}", 0, 0) for index in range(len(rows))]
    return Batch(keys, {"input_ids": ids, **weighed, **columns})


def test_updates_of_the_learner_are_served_as_it_computes_them(served: Served) -> None:
    learner, batch = served.learner, batch_of(SEQUENCES)
    before = learner.logprobs(batch).values.copy()
    for version in range(1, 4):
        learner.train_step(batch, supervised_objective)
        logprobs = learner.logprobs(batch)
        update = TensorTransport().pack(learner.export_weights(), version=version, tied=learner.tied)
        canary = Canary(sequences=SEQUENCES, logprobs=list(logprobs))
        report = asyncio.run(publish_weights(update, [served.engine], canary=canary, tolerances=served.tolerances))
        assert report.canary_max_diff < served.tolerances.canary
        assert report.num_tensors == 3 + NUM_LAYERS * 11 + 3 + 2 * (2 + 3 * (NUM_EXPERTS + 1))
    assert np.abs(logprobs.values - before).max() > 1, "the updates must move the policy, or the test says nothing"
    stored = load_file(served.folder / "model.safetensors")
    assert torch.equal(update.location.tensors[BIAS], stored[BIAS])


def test_the_router_computes_in_float32(served: Served) -> None:
    def dtypes(worker: Any) -> set[torch.dtype]:
        mixture = worker.worker.model_runner.get_model().model.layers[1].mlp
        return {mixture.gate.out_dtype, mixture.gate.params_dtype, mixture.experts.router.e_score_correction_bias.dtype}

    assert served.on_worker(dtypes) == [{torch.float32}]


def test_experts_that_the_engine_tells_are_replayed(served: Served) -> None:
    """In float32 the learner chooses the same experts; in bfloat16 replaying them reduces the mismatch."""
    requests = [
        GenerateRequest(
            input_ids=row[:30], sampling=SamplingParams(max_tokens=20, seed=seed), num_samples=4, request_id=f"{seed}"
        )
        for seed, row in enumerate(SEQUENCES)
    ]

    async def ask() -> list[Any]:
        return list(await asyncio.gather(*map(served.engine.generate, requests)))

    samples = [(one.input_ids, each) for one, group in zip(requests, asyncio.run(ask()), strict=True) for each in group]
    rows = [joined(prompt, sample) for prompt, sample in samples]
    experts = [sample.routed_experts for _, sample in samples]
    assert all((one[:, 0] == -1).all() and (one[:-1, 1:] >= 0).all() for one in experts)
    batch = batch_of(rows)
    told = Ragged(np.concatenate(experts), batch.ragged("input_ids").offsets)
    found = {
        "replayed": served.learner.logprobs(batch.with_columns({"routed_experts": told})),
        "anew": served.learner.logprobs(batch),
    }
    ratios = {  # k3 is exp(d) - 1 - d
        kind: np.concatenate([s.logprobs - r[len(p) :] for (p, s), r in zip(samples, logprobs, strict=True)])
        for kind, logprobs in found.items()
    }
    assert np.abs(ratios["replayed"]).max() < served.distance
    divergence = {kind: float(np.mean(np.exp(-ratio) - 1 + ratio)) for kind, ratio in ratios.items()}
    if served.dtype == "bfloat16":
        assert divergence["replayed"] < divergence["anew"] / 3
    else:  # a different expert would change the logprobs more
        np.testing.assert_allclose(found["replayed"].values, found["anew"].values, rtol=0, atol=1e-6)
    other = np.where(told.values < 0, told.values, (told.values + 1) % NUM_EXPERTS)
    changed = served.learner.logprobs(batch.with_columns({"routed_experts": Ragged(other, told.offsets)}))
    assert np.abs(changed.values - found["replayed"].values).max() > 0.1


@pytest.mark.parametrize("transport", [TensorTransport, BroadcastTransport])
def test_other_biases_are_served_and_proven(transport: Any, served: Served) -> None:
    tensors = perturbed({n: t.float() for n, t in served.learner.export_weights().items()}, scale=0.02)
    sender = transport()
    served.publish(sender.pack(tensors, version=7, tied={}))
    sender.close()

    def live(worker: Any) -> torch.Tensor:
        return worker.worker.model_runner.get_model().model.layers[1].mlp.experts.router.e_score_correction_bias.clone()

    assert torch.equal(served.on_worker(live)[0], tensors[BIAS])


STALE = {
    "bias": BIAS,
    "router's bias": BIAS,
    "shared expert": "model.layers.2.mlp.shared_experts.up_proj.weight",
    "gate": "model.layers.1.mlp.gate.weight",
}


@pytest.mark.parametrize("kind", STALE)
def test_what_is_stale_is_named(kind: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a stale bias by its bits, also if only the router holds an old tensor and its gate the new one."""
    old = {name: tensor.float().clone() for name, tensor in served.learner.export_weights().items()}
    name, tensors = STALE[kind], perturbed(old, scale=1e-6 if "bias" in kind else 0.1)
    core = served.engine._stepper._core  # type: ignore[union-attr] # vLLM's stepper
    ask = core.collective_rpc

    def break_one(worker: Any) -> None:
        mixture = worker.worker.model_runner.get_model().model.layers[1].mlp
        if kind == "bias":
            mixture.gate.e_score_correction_bias.data.copy_(old[name])
        elif kind == "router's bias":
            mixture.experts.router.e_score_correction_bias = old[name]
        else:
            worker.replace_all_weights({**tensors, name: old[name]}, [])

    def act_and_ask(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "probe_live_weights":
            ask(break_one)
        return ask(method, *args, **kwargs)

    def mend(worker: Any) -> None:
        mixture = worker.worker.model_runner.get_model().model.layers[1].mlp
        mixture.experts.router.e_score_correction_bias = mixture.gate.e_score_correction_bias

    update = TensorTransport().pack(tensors, version=9, tied={})
    with monkeypatch.context() as patch:
        patch.setattr(core, "collective_rpc", act_and_ask)
        with pytest.raises(WeightProofError) as raised:
            served.publish(update)
    assert raised.value.tensor == name
    ask(mend)
    served.publish(update)
