"""Every architecture of transformers trains: each family against the class itself, row by row, in float32.

With RL_RECORD_FAMILIES=1, the results of these tests are written into `golden/families.json`, of which
`tooling.models_page` makes docs/models.md.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, IN_CI, make_family
from numpy.typing import NDArray

from rl_core import Batch, Ragged, RowKey
from rl_core.data import FloatArray, offsets_of
from rl_core.errors import SettingsError
from rl_core.weights import Canary, ProofTolerances, TensorTransport, folder_views, publish_weights
from rl_distill import (
    LearnerOptions,
    LoraOptions,
    ParallelOptions,
    PolicyConfig,
    adapted_modules,
    parse_policy_config,
    read_policy_config,
)
from rl_distill.megatron import transformers_chunk
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.megatron.transformers_chunk import TransformersModel
from rl_distill.objectives.policy import supervised_objective
from rl_rollout.engines import TransformersOptions
from rl_rollout.engines.transformers import TransformersEngine

OPTIONS = LearnerOptions(
    learning_rate=1e-3, micro_batch_tokens=18, shared_prefix_tokens=4, weight_decay=0.0, num_threads=1
)
RESULTS = Path(__file__).parent / "golden" / "families.json"
UNPACKED = ("bloom", "falcon", "gptj", "qwen3-next", "qwen3.5", "lfm2", "falcon-h1", "granite-hybrid", "mamba")
"""Families whose rows are padded: their layers keep a state, or do not use a replaceable attention."""

families = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.soak) for name in FAMILIES]
)


def make_batch(lengths: Sequence[int] = (9, 5, 14, 6, 3), *, num_prompts: int = 2) -> Batch:
    """Return rows of two prompts; rows of a prompt begin with the same six tokens, if they are as long."""
    random, offsets = np.random.default_rng(0), offsets_of(np.asarray(lengths))
    ids = random.integers(3, 128, int(offsets[-1])).astype(np.int32)
    for row in range(num_prompts, len(lengths)):
        start, first = offsets[row], offsets[row % num_prompts]
        size = min(6, lengths[row], lengths[row % num_prompts])
        ids[start : start + size] = ids[first : first + size]
    positions = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    mask = positions >= 2
    columns = {"input_ids": ids, "loss_mask": mask, "loss_weights": (mask / mask.sum()).astype(np.float32)}
    keys = [RowKey(f"prompt{row % num_prompts}", row // num_prompts, 0) for row in range(len(lengths))]
    return Batch(keys, {name: Ragged(values, offsets) for name, values in columns.items()})


def class_of(folder: Path) -> Any:
    """Return the class's own model, which computes attention by its own code."""
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options).eval()


def class_logprobs(model: Any, row: NDArray[np.int32]) -> torch.Tensor:
    ids = torch.from_numpy(row.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return torch.nn.functional.pad(torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0], (1, 0))


def class_step(model: Any, batch: Batch) -> tuple[FloatArray, float, Mapping[str, torch.Tensor]]:
    """Return logprobs, the loss and each gradient by the folder's names."""
    model.zero_grad()
    rows, weights = batch.ragged("input_ids"), batch.ragged("loss_weights")
    of_rows = [class_logprobs(model, row) for row in rows]
    loss = -sum((lp * torch.from_numpy(np.array(w))).sum() for lp, w in zip(of_rows, weights, strict=True))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(of_rows).detach().numpy(), float(loss), folder_views(model, gradients)


def model_of(learner: MegatronLearner | MegatronCritic, name: str = "policy") -> TransformersModel:
    """Return the model of a learner in this process."""
    (chunk,) = learner._ranks._host._models[name]._chunks  # type: ignore[union-attr]
    (model,) = [module for module in chunk.modules() if isinstance(module, TransformersModel)]
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def folder(name: str, folders: Path) -> Path:
    if not (folders / name).exists():
        make_family(name, folders / name)
    return folders / name


@pytest.fixture
def learner(folder: Path) -> Iterator[MegatronLearner]:
    learner = MegatronLearner(folder, OPTIONS)
    yield learner
    learner.close()


class FamilyResults:
    """Results by family: what was found in these tests, or in an earlier recording."""

    def __init__(self) -> None:
        self.recorded: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def note(self, name: str, **found: str | bool | float) -> None:
        """Keep results when recording; otherwise compare the classes and choices, which do not depend on rounding."""
        if os.environ.get("RL_RECORD_FAMILIES"):
            self.recorded.setdefault(name, {}).update(found)
            return
        earlier = self.recorded[name]
        differing = [key for key, value in found.items() if type(value) is not float and earlier[key] != value]
        assert not differing, f"{RESULTS} is out of date for {name}: {differing}; record it with RL_RECORD_FAMILIES=1"


@pytest.fixture(scope="module")
def results() -> Iterator[FamilyResults]:
    results = FamilyResults()
    yield results
    if os.environ.get("RL_RECORD_FAMILIES"):
        ordered = {name: results.recorded[name] for name in FAMILIES if name in results.recorded}
        RESULTS.write_text(json.dumps(ordered, indent=1, sort_keys=False) + "\n")


def has_adapters(config: PolicyConfig) -> bool:
    """Return whether an adapter can change a matrix."""
    try:
        return bool(adapted_modules(config, LoraOptions(rank=1)))
    except SettingsError:
        return False


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(1.0, abs(expected))


@families
def test_a_step_is_that_of_the_class(name: str, folder: Path, learner: MegatronLearner, results: FamilyResults) -> None:
    """Also: the way to compute rows is the expected one, and names and gradients are those of the folder."""
    batch, model = make_batch(), class_of(folder)
    expected, loss, gradients = class_step(model, batch)
    logprobs = float(np.abs(learner.logprobs(batch).values - expected).max())
    assert logprobs <= 2e-5
    own_model = model_of(learner)
    result = learner.train_step(batch, supervised_objective)
    assert relative(result.loss, loss) <= 1e-5
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    assert relative(result.grad_norm, norm) <= 1e-5
    assert own_model.is_packed == (name not in UNPACKED)
    own = {n: p.main_grad for n, p in own_model.inner.named_parameters() if p.requires_grad}
    found = folder_views(own_model.inner, own)
    scale = result.grad_norm if result.grad_norm > OPTIONS.clip_grad else OPTIONS.clip_grad  # they are clipped in place
    for tensor, gradient in gradients.items():
        difference = (found[tensor].float() * scale / OPTIONS.clip_grad - gradient).abs().max()
        assert float(difference) <= 1e-4 * float(gradient.abs().max()) + 1e-6, tensor
    config = parse_policy_config(read_policy_config(folder))
    results.note(
        name,
        architecture=type(model).__name__,
        backend="transformers" if config.model_json else "megatron",
        packed=own_model.is_packed,
        prefixes=own_model.shares_prefixes,
        adapters=has_adapters(config),
        logprobs=logprobs,
    )


@families
def test_weights_are_exported_saved_and_resumed(
    name: str, folder: Path, learner: MegatronLearner, tmp_path: Path
) -> None:
    batch, model = make_batch(), class_of(folder)
    untrained = learner.export_weights()
    stored = folder_views(model, model.state_dict())
    assert untrained.keys() | learner.tied.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[one]) for one, tensor in untrained.items())
    learner.train_step(batch, supervised_objective)
    learner.save(tmp_path / "saved")
    other = MegatronLearner(folder, OPTIONS, name="other")
    other.load(tmp_path / "saved")
    trained = class_of(tmp_path / "saved" / "policy")
    for row, found in zip(batch.ragged("input_ids"), learner.logprobs(batch), strict=True):
        assert np.abs(class_logprobs(trained, row).detach().numpy() - found).max() <= 2e-5
    first, second = (one.train_step(batch, supervised_objective) for one in (learner, other))
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    other.close()


@families
def test_the_transformers_engine_serves_each_update_with_proof(
    name: str, folder: Path, learner: MegatronLearner, results: FamilyResults
) -> None:
    batch = make_batch()

    async def serve() -> float:
        engine = TransformersEngine(folder, TransformersOptions(dtype="float32", device="cpu", max_model_len=64))
        await engine.start()
        try:
            learner.train_step(batch, supervised_objective)
            weights = {one: tensor.clone() for one, tensor in learner.export_weights().items()}
            update = TensorTransport().pack(weights, version=1, tied=learner.tied)
            canary = Canary(sequences=list(batch.ragged("input_ids")), logprobs=list(learner.logprobs(batch)))
            report = await publish_weights(update, [engine], canary=canary, tolerances=ProofTolerances())
        finally:
            await engine.close()
        return report.canary_max_diff

    served = asyncio.run(serve())
    assert served <= 1e-4
    results.note(name, served=served)


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "falcon-h1"])
def test_a_critic_and_recomputation_give_the_same(name: str, folder: Path) -> None:
    batch = make_batch()
    found = []
    for recompute in ("none", "full"):
        learner = MegatronLearner(folder, replace(OPTIONS, recompute=recompute))
        found.append(learner.train_step(batch, supervised_objective))
        learner.close()
    assert relative(found[1].loss, found[0].loss) <= 1e-6
    assert relative(found[1].grad_norm, found[0].grad_norm) <= 1e-6
    critic = MegatronCritic(folder, OPTIONS)
    assert not np.any(critic.values(batch).values)
    assert critic.export_weights().keys() >= {"score.weight", "score.bias"}
    inner = next(
        m for m in critic._ranks._host._models["critic"]._chunks[0].modules() if isinstance(m, TransformersModel)
    )  # type: ignore[union-attr]
    assert inner.is_packed == (name not in UNPACKED)
    critic.close()


def test_prefixes_are_not_shared_if_sharing_changes_the_logprobs(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (folders / "phi3").exists():
        make_family("phi3", folders / "phi3")
    right = transformers_chunk.packed_attention

    def wrong(qkv: Any, layout: Any, *, scale: float) -> torch.Tensor:
        return right(qkv, layout, scale=scale) * (2.0 if layout.spans else 1.0)

    for attention, shares in ((right, True), (wrong, False)):
        monkeypatch.setattr(transformers_chunk, "packed_attention", attention)
        learner = MegatronLearner(folders / "phi3", OPTIONS)
        assert model_of(learner).is_packed
        assert model_of(learner).shares_prefixes == shares
        learner.close()


def test_two_ranks_compute_what_one_computes(folders: Path) -> None:
    ranks = LearnerRanks(ParallelOptions(ranks=2, distributed_optimizer=True), num_threads=1)
    try:
        for name in ("phi3", "mixtral", "qwen3-next"):
            if not (folders / name).exists():
                make_family(name, folders / name)
            batch, results = make_batch(), []
            for of_ranks in (None, ranks):
                learner = MegatronLearner(folders / name, OPTIONS, ranks=of_ranks)
                results.append([learner.train_step(batch, supervised_objective) for _ in range(3)])
                learner.close()
            for one, two in zip(*results, strict=True):
                assert relative(two.loss, one.loss) <= 1e-5
                assert relative(two.grad_norm, one.grad_norm) <= 1e-5
    finally:
        ranks.close()
