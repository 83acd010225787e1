"""Every architecture of transformers trains: each family against the class itself, row by row, in float32.

With RL_RECORD_FAMILIES=1, the results of these tests are written into `golden/families.json`, of which
`tooling.models_page` makes docs/models.md.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from families import FAMILIES, IN_CI, make_family
from numpy.typing import NDArray
from offered_weights import OfferedTo, assert_offered
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core import Batch, Ragged, RowKey
from rl_core.data import FloatArray, offsets_of
from rl_core.errors import SettingsError, ShapeError
from rl_core.weights import (
    AdapterUpdate,
    Canary,
    ProofTolerances,
    TensorTransport,
    digest_tensors,
    folder_views,
    publish_weights,
)
from rl_core.weights.broadcast import SenderOptions
from rl_distill import (
    LearnerOptions,
    LoraOptions,
    ParallelOptions,
    PolicyConfig,
    adapted_modules,
    parse_policy_config,
    rank_memory,
    read_policy_config,
)
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.megatron.any_model import chunk as transformers_chunk
from rl_distill.megatron.any_model.chunk import TransformersModel
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner, MegatronReference
from rl_distill.megatron.rank_model import RankModel
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.objectives.policy import supervised_objective
from rl_rollout.engines import TransformersOptions
from rl_rollout.engines.transformers import TransformersEngine

OPTIONS = LearnerOptions(
    learning_rate=1e-3, micro_batch_tokens=18, shared_prefix_tokens=4, weight_decay=0.0, num_threads=1
)
CALM = replace(OPTIONS, learning_rate=1e-4, eps=1e-5)
"""Options under which gradients that are zero but for rounding hardly move a weight."""
DIVIDED = ("gpt2", "gemma2", "mixtral", "gpt-oss", "falcon-h1")
"""Families that ranks divide in CI: tied heads, windows, experts in three axes, sinks and convolutions."""
RESULTS = Path(__file__).parent / "golden" / "families.json"
UNPACKED = ("bloom", "falcon", "gptj", "qwen3-next", "qwen3.5", "lfm2", "falcon-h1", "granite-hybrid", "mamba")
"""Families whose rows are padded: their layers keep a state, or do not use a replaceable attention."""

divided = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DIVIDED else pytest.mark.soak) for name in FAMILIES]
)
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


@pytest.fixture(scope="module")
def sharded() -> Iterator[LearnerRanks]:
    """Two ranks that divide weights, gradients and moments."""
    ranks = LearnerRanks(ParallelOptions(ranks=2, shard_weights=True), num_threads=1)
    yield ranks
    ranks.close()


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
    assert different_tensors(stored, untrained) == []
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
def test_recomputation_gives_the_same(name: str, folder: Path) -> None:
    found = []
    for recompute in ("none", "full"):
        learner = MegatronLearner(folder, replace(OPTIONS, recompute=recompute))
        found.append(learner.train_step(make_batch(), supervised_objective))
        learner.close()
    assert relative(found[1].loss, found[0].loss) <= 1e-6
    assert relative(found[1].grad_norm, found[0].grad_norm) <= 1e-6


def squared_values(values: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, MetricSums]:
    return (values.square() * micro.columns["loss_weights"]).sum(), {}


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "falcon-h1"])
def test_a_critics_values_and_gradients_are_those_of_the_class(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "critic")
    generator = torch.Generator().manual_seed(3)
    head = {"score.weight": torch.randn(1, 64, generator=generator), "score.bias": torch.tensor([0.3])}
    save_file(load_file(folder / "model.safetensors") | head, tmp_path / "critic" / "model.safetensors")
    batch, model = make_batch(), class_of(folder)
    weights, expected = batch.ragged("loss_weights"), []
    for row in batch.ragged("input_ids"):
        ids = torch.from_numpy(row.astype(np.int64))
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        values = (hidden @ head["score.weight"].t() + head["score.bias"])[:, 0]
        expected.append(torch.nn.functional.pad(values, (1, 0)))
    loss = (torch.cat(expected).square() * torch.from_numpy(weights.values)).sum()
    loss.backward()

    critic = MegatronCritic(tmp_path / "critic", OPTIONS)
    found = critic.values(batch).values
    assert np.abs(found - torch.cat(expected).detach().numpy()).max() <= 2e-5 * np.abs(found).max()
    result = critic.train_step(batch, squared_values)
    assert relative(result.loss, float(loss.detach())) <= 1e-5
    inner = model_of(critic, "critic")
    assert inner.is_packed == (name not in UNPACKED)
    own = folder_views(inner.inner, {n: p.main_grad for n, p in inner.inner.named_parameters() if p.requires_grad})
    class_gradients = folder_views(model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    scale = max(result.grad_norm, OPTIONS.clip_grad) / OPTIONS.clip_grad  # they are clipped in place
    assert class_gradients.keys() <= own.keys()
    for tensor, gradient in class_gradients.items():
        difference = (own[tensor].float() * scale - gradient).abs().max()
        assert float(difference) <= 1e-4 * float(gradient.abs().max()) + 1e-6 * result.grad_norm, tensor
    critic.close()


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "phimoe",
        "qwen3-next",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("phi3", "falcon", "gpt-oss", "falcon-h1", "bloom")),
    ],
)
def test_an_adapter_trains_as_in_peft_and_is_served(name: str, folder: Path, tmp_path: Path) -> None:
    lora, batch = LoraOptions(rank=4, alpha=8.0, target_modules=("all-linear",)), make_batch()
    learner = MegatronLearner(folder, replace(OPTIONS, learning_rate=1e-2), lora=lora)
    for _ in range(2):  # B begins with 0
        learner.train_step(batch, supervised_objective)
    learner.save(tmp_path / "saved")
    model = PeftModel.from_pretrained(class_of(folder), tmp_path / "saved" / "adapter", is_trainable=True)
    own = [class_logprobs(model, row) for row in batch.ragged("input_ids")]
    found = learner.logprobs(batch)
    assert np.abs(found.values - torch.cat(own).detach().numpy()).max() <= 2e-5
    loss = -(torch.cat(own) * torch.from_numpy(batch.ragged("loss_weights").values)).sum()
    loss.backward()
    norm = float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())

    async def serve() -> float:
        options = TransformersOptions(dtype="float32", device="cpu", max_model_len=64, max_lora_rank=4)
        engine = TransformersEngine(folder, options)
        await engine.start()
        try:
            told = AdapterUpdate(rank=4, base=digest_tensors(learner.export_base()))
            update = TensorTransport().pack(learner.export_adapter(), version=1, tied=learner.tied, adapter=told)
            canary = Canary(sequences=list(batch.ragged("input_ids")), logprobs=list(found))
            report = await publish_weights(update, [engine], canary=canary, tolerances=ProofTolerances())
        finally:
            await engine.close()
        return report.canary_max_diff

    assert asyncio.run(serve()) <= 1e-4
    result = learner.train_step(batch, supervised_objective)
    assert relative(result.loss, float(loss.detach())) <= 1e-5
    assert relative(result.grad_norm, norm) <= 1e-5
    assert not any("router" in name or "mamba.out_proj" in name for name in learner.export_adapter())
    learner.close()


@pytest.mark.parametrize("name", ["gemma2", "gptj", "mixtral", "qwen3-next", "mamba"])
def test_the_same_way_is_chosen_in_bfloat16(name: str, folder: Path) -> None:
    """The logprobs of GPT-J's small weights differ by less than rounding, but its rows see one another if packed."""
    learner = MegatronLearner(folder, replace(OPTIONS, dtype="bfloat16"))
    assert model_of(learner).is_packed == (name not in UNPACKED)
    learner.close()


def test_a_way_that_loses_windows_is_noticed_in_bfloat16(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (folders / "mistral-window").exists():
        make_family("mistral-window", folders / "mistral-window")
    monkeypatch.setattr(transformers_chunk, "_mask_rule", lambda *_, **__: None)
    learner = MegatronLearner(folders / "mistral-window", replace(OPTIONS, dtype="bfloat16"))
    assert not model_of(learner).is_packed
    learner.close()


def test_longrope_is_exact_up_to_the_length_that_fixes_its_angles(tmp_path: Path) -> None:
    short, long = np.linspace(1.0, 1.5, 8).tolist(), np.linspace(1.0, 8.0, 8).tolist()
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}
    make_family("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=14)
    learner, batch = MegatronLearner(tmp_path, OPTIONS), make_batch()
    expected, *_ = class_step(class_of(tmp_path), batch)
    assert np.abs(learner.logprobs(batch).values - expected).max() <= 2e-5
    with pytest.raises(ShapeError, match=r"at most 14 tokens.*row 1 has 15"):
        learner.logprobs(make_batch((9, 15)))
    learner.close()


SIZES = {"vocab_size": 128, "hidden_size": 32}
SMALL = {**SIZES, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}

PROPHETS = {f"num_{part}_{of}": 2 for part in ("encoder", "decoder") for of in ("layers", "attention_heads")}


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("bert", SMALL, "BertLMHeadModel cannot be trained: its tokens see later ones.*set is_decoder = true"),
        ("xlnet", {"vocab_size": 128, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}, "its tokens see later"),
        (
            "xmod",
            {"is_decoder": True, "languages": ["en", "de"]},
            "XmodForCausalLM cannot be trained: .* single row of",
        ),
        ("prophetnet", {**SIZES, **PROPHETS}, "ProphetNetForCausalLM cannot be trained: .* single row of tokens"),
    ],
)
def test_a_class_that_does_not_predict_tokens_from_earlier_ones_is_refused(
    kind: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(kind, **fields)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=says):
        MegatronLearner(tmp_path, OPTIONS)


def test_an_encoder_that_is_a_decoder_trains(tmp_path: Path) -> None:
    """RoBERTa counts positions from the padding token's id."""
    config = AutoConfig.for_model("roberta", **SMALL, is_decoder=True, max_position_embeddings=64)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(tmp_path)
    learner, batch = MegatronLearner(tmp_path, OPTIONS), make_batch()
    expected, *_ = class_step(class_of(tmp_path), batch)
    assert np.abs(learner.logprobs(batch).values - expected).max() <= 2e-5
    learner.close()

    async def scores() -> list[FloatArray]:
        engine = TransformersEngine(tmp_path, TransformersOptions(dtype="float32", device="cpu", max_model_len=32))
        await engine.start()
        found = await engine.score(list(batch.ragged("input_ids")))
        await engine.close()
        return [one.logprobs[:, 0] for one in found]

    assert np.abs(np.concatenate(asyncio.run(scores())) - expected).max() <= 1e-4


def test_a_conversion_that_writes_into_its_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is the parameter itself there, which would change."""

    def writes(_: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {name: tensor.clone().mul_(2.0) for name, tensor in tensors.items()}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", writes)
    with pytest.raises(SettingsError, match="transformers computes tensor 'weight' of Linear's folder"):
        folder_views(torch.nn.Linear(2, 2), {"weight": torch.ones(2, 2)})


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


@divided
def test_ranks_that_divide_the_weights_compute_what_one_computes(
    name: str, folder: Path, sharded: LearnerRanks
) -> None:
    """Also: they export and send the same tensors, and each holds half of everything."""
    batch = make_batch()
    one, two = (MegatronLearner(folder, CALM, ranks=ranks) for ranks in (None, sharded))
    assert two.num_parameters == one.num_parameters
    assert np.abs(two.logprobs(batch).values - one.logprobs(batch).values).max() <= 2e-5
    for _ in range(3):
        expected, found = (learner.train_step(batch, supervised_objective) for learner in (one, two))
        assert relative(found.loss, expected.loss) <= 1e-5
        assert relative(found.grad_norm, expected.grad_norm) <= 1e-5
    weights, exported = one.export_weights(), two.export_weights()
    assert list(exported) == list(weights)
    assert all(torch.allclose(exported[tensor], weights[tensor], rtol=0, atol=1e-3) for tensor in weights)
    engine, update = OfferedTo(), two.offer_weights(SenderOptions(deadline_s=20.0), version=1)
    assert_offered(engine.take(update)[0], update, exported)
    engine.close()
    whole, (first, second) = one._call_all(RankModel.memory)[0], two._call_all(RankModel.memory)
    for of_one, *of_two in zip(whole, first, second, strict=True):
        assert max(of_two) <= 0.55 * of_one + 2000  # one more row, and a router's bias
    (planned,) = rank_memory(parse_policy_config(read_policy_config(folder)), sharded.parallel, dtype=CALM.dtype)
    assert [sum(size) / 2 for size in zip(first, second, strict=True)] == pytest.approx(planned, rel=0.02)
    one.close()
    two.close()


@divided
def test_divided_weights_are_saved_and_resumed_on_any_ranks(
    name: str, folder: Path, sharded: LearnerRanks, tmp_path: Path
) -> None:
    batch = make_batch()
    two = MegatronLearner(folder, CALM, ranks=sharded)
    assert different_tensors(views(class_of(folder)), two.export_weights()) == []
    two.train_step(batch, supervised_objective)
    two.save(tmp_path / "saved")
    assert different_tensors(views(class_of(tmp_path / "saved" / "policy")), two.export_weights()) == []
    again, one = (MegatronLearner(folder, CALM, ranks=ranks, name="other") for ranks in (sharded, None))
    for other in (again, one):
        other.load(tmp_path / "saved")
        assert different_tensors(other.export_weights(), two.export_weights()) == []
    first, second, third = (learner.train_step(batch, supervised_objective) for learner in (two, again, one))
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert different_tensors(again.export_weights(), two.export_weights()) == []
    assert relative(third.loss, first.loss) <= 1e-5
    assert relative(third.grad_norm, first.grad_norm) <= 1e-5
    one.save(tmp_path / "by one")
    again.load(tmp_path / "by one")
    assert different_tensors(again.export_weights(), one.export_weights()) == []
    for learner in (two, again, one):
        learner.close()


def test_three_ranks_resume_what_two_saved(folders: Path, sharded: LearnerRanks, tmp_path: Path) -> None:
    """The rows of most tensors do not divide by three."""
    if not (folders / "gpt-oss").exists():
        make_family("gpt-oss", folders / "gpt-oss")
    three = LearnerRanks(ParallelOptions(ranks=3, shard_weights=True), num_threads=1)
    batch, found = make_batch(), []
    for ranks in (sharded, three):
        learner = MegatronLearner(folders / "gpt-oss", CALM, ranks=ranks)
        if ranks is three:
            learner.load(tmp_path / "saved")
        else:
            learner.train_step(batch, supervised_objective)
            learner.save(tmp_path / "saved")
        weights = list(learner.export_weights().values())
        found.append((weights, learner.train_step(batch, supervised_objective)))
        learner.close()
    three.close()
    (before, first), (after, second) = found
    assert different_tensors(dict(enumerate(after)), enumerate(before)) == []
    assert relative(second.loss, first.loss) <= 1e-5
    assert relative(second.grad_norm, first.grad_norm) <= 1e-5


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"recompute": "full", "weight_decay": 0.1}])
@pytest.mark.parametrize("name", ["phi3", "qwen3-next"])
def test_the_optimizer_of_divided_weights_is_that_of_whole_ones(
    name: str, options: dict[str, Any], folder: Path
) -> None:
    """On one rank, whose sums have the same order."""
    ranks, results = LearnerRanks(ParallelOptions(shard_weights=True)), []
    for of_ranks in (None, ranks):
        learner = MegatronLearner(folder, replace(OPTIONS, learning_rate=1e-4, **options), ranks=of_ranks)
        steps = [learner.train_step(make_batch(), supervised_objective) for _ in range(3)]
        results.append((steps, {name: tensor.clone() for name, tensor in learner.export_weights().items()}))
        learner.close()
    (one, weights), (two, divided) = results
    for expected, found in zip(one, two, strict=True):
        assert relative(found.loss, expected.loss) <= 1e-6
        assert relative(found.grad_norm, expected.grad_norm) <= 1e-5
    assert weights
    assert all(divided[name].dtype == tensor.dtype for name, tensor in weights.items())
    assert all(torch.allclose(divided[name], tensor, rtol=0, atol=1e-4) for name, tensor in weights.items())


def test_a_divided_critic_and_reference_compute_what_whole_ones_do(folders: Path, sharded: LearnerRanks) -> None:
    if not (folders / "gemma2").exists():
        make_family("gemma2", folders / "gemma2")
    batch, found = make_batch(), []
    for ranks in (None, sharded):
        reference = MegatronReference(folders / "gemma2", OPTIONS, ranks=ranks)
        found.append(reference.logprobs(batch).values)
        reference.close()
        critic = MegatronCritic(folders / "gemma2", OPTIONS, ranks=ranks)
        assert not np.any(critic.values(batch).values)
        assert critic.export_weights().keys() >= {"score.weight", "score.bias"}
        critic.close()
    assert np.abs(found[1] - found[0]).max() <= 2e-5


def views(model: Any) -> Any:
    return folder_views(model, model.state_dict())
