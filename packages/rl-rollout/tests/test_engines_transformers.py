"""The transformers engine: conformance with tied and untied heads, and bitwise reproducibility."""

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from offered_weights import TwoRanks, held_by
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rl_core.errors import EngineError, NotReadyError, WeightProofError, WeightsGoneError
from rl_core.weights import (
    AdapterUpdate,
    PassingChecksums,
    ProofTolerances,
    TensorTransport,
    check_receipt,
    digest_tensors,
    folder_views,
)
from rl_core.weights.broadcast import BroadcastTransport, SenderOptions, join_offers, offer_from_rank
from rl_core.weights.transports import SharedFileTransport
from rl_rollout.engines import transformers_stepper
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.engines.transformers import TransformersEngine, TransformersOptions
from rl_rollout.engines.transformers_stepper import TransformersStepper
from rl_rollout.engines.weight_checks import each_expert, tensor_shapes
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.testing import EngineConformance, begin, generate, reference_logprobs, refuses
from rl_rollout.testing.reference_model import PROMPT, TIED_HEAD, long_request, perturbed, token_logprobs
from rl_rollout.testing.update_checks import UpdateChecks

OPTIONS = TransformersOptions(max_model_len=128)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def started(model_dir: Path, options: TransformersOptions = OPTIONS) -> TransformersEngine:
    engine = TransformersEngine(model_dir, options)
    asyncio.run(engine.start())
    return engine


@pytest.fixture
def engine(tied_model_dir: Path) -> Iterator[TransformersEngine]:
    engine = started(tied_model_dir)
    yield engine
    asyncio.run(engine.close())


class TestTransformersEngine(EngineConformance):
    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, engine: TransformersEngine) -> RolloutEngine:
        return engine


class TestUntiedTransformersEngine(EngineConformance):
    transport = SharedFileTransport

    @pytest.fixture
    def model_dir(self, untied_model_dir: Path) -> Path:
        return untied_model_dir

    @pytest.fixture
    def engine(self, untied_model_dir: Path) -> Iterator[RolloutEngine]:
        engine = started(untied_model_dir)
        yield engine
        asyncio.run(engine.close())


class SuiteRanks(TwoRanks):
    """A learner with two ranks, which the conformance suite can close."""

    def __init__(self) -> None:
        super().__init__(SenderOptions(bucket_bytes=10_000))

    def close(self) -> None:
        self.end()


@pytest.mark.parametrize("transport", [SuiteRanks, BroadcastTransport])
@pytest.mark.parametrize(
    "check",
    [UpdateChecks.test_an_update_replaces_what_is_served, UpdateChecks.test_a_refused_update_changes_nothing],
)
def test_weights_are_updated_over_the_network(
    check: Callable[..., None], transport: Callable[[], Any], engine: TransformersEngine, tied_model_dir: Path
) -> None:
    suite = UpdateChecks()
    suite.transport = transport  # type: ignore[assignment]
    check(suite, engine, tied_model_dir)


def test_a_rank_that_is_gone_leaves_the_engine_as_it_was(engine: TransformersEngine, tied_model_dir: Path) -> None:
    tensors = load_file(tied_model_dir / "model.safetensors")
    ranks = TwoRanks(SenderOptions(deadline_s=1.0))
    update = ranks.pack(perturbed(tensors, scale=0.05), version=3, tied=TIED_HEAD)
    before = generate(engine, seed=4)[0]
    ranks.senders[1].close()
    with pytest.raises(WeightsGoneError, match=r"rank 1 of the learner .*cannot be reached"):
        asyncio.run(engine.update_weights(update))
    after = generate(engine, seed=4)[0]
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert set(after.policy_versions.tolist()) == {0}
    ranks.end()


def test_a_rank_that_fails_midway_fails_the_engine_and_is_named(
    engine: TransformersEngine, tied_model_dir: Path
) -> None:
    """Half of the engine's weights are new, so it must stop."""
    tensors = load_file(tied_model_dir / "model.safetensors")
    parts, broken = [held_by(rank, tensors) for rank in range(2)], threading.Event()
    read = parts[1][-1].read

    def read_or_fail() -> torch.Tensor:
        if broken.is_set():
            raise RuntimeError("out of memory")
        return read()

    parts[1][-1] = replace(parts[1][-1], read=read_or_fail)
    ranks = TwoRanks(SenderOptions(bucket_bytes=1000, deadline_s=5.0))
    offers = [
        offer_from_rank(sender, part, ranks.options, version=3)
        for sender, part in zip(ranks.senders, parts, strict=True)
    ]
    update = join_offers(offers, tensors, version=3, tied=TIED_HEAD)
    broken.set()
    with pytest.raises(EngineError, match=r"rank 1 of the learner: .*could not be transferred"):
        asyncio.run(engine.update_weights(update))
    with pytest.raises(EngineError, match="rank 1 of the learner"):
        generate(engine)
    ranks.end()


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        mlp_only_layers=[0],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture
def mixture_engine(mixture_dir: Path) -> Iterator[TransformersEngine]:
    """Start an engine whose folder stores each expert's tensors, as learners publish them; transformers joins them."""
    engine = started(mixture_dir)
    yield engine
    asyncio.run(engine.close())


def test_a_mixture_takes_updates_whole_or_not_at_all(mixture_engine: TransformersEngine, mixture_dir: Path) -> None:
    UpdateChecks().test_an_update_replaces_what_is_served(mixture_engine, mixture_dir)
    UpdateChecks().test_a_refused_update_changes_nothing(mixture_engine, mixture_dir)


def test_a_stale_expert_is_named(
    mixture_engine: TransformersEngine, mixture_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update writes one expert to a copy of the served tensor."""
    name, calls = "model.layers.1.mlp.experts.2.up_proj.weight", itertools.count()

    def first_a_copy(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        apart = folder_views(model, tensors)
        return apart if next(calls) else {**apart, name: apart[name].clone()}

    monkeypatch.setattr("rl_rollout.engines.transformers_stepper.folder_views", first_a_copy)
    tensors = perturbed(load(mixture_dir), scale=0.05)
    update, receipt = asyncio.run(UpdateChecks().send(mixture_engine, tensors, version=1))
    with pytest.raises(WeightProofError, match="serves something else") as raised:
        check_receipt(update, receipt, tolerances=ProofTolerances())
    assert raised.value.tensor == name


def test_joined_experts_are_known_one_by_one(mixture_dir: Path, tmp_path: Path) -> None:
    apart = load(mixture_dir)
    names = [f"model.layers.1.mlp.experts.{{}}.{kind}_proj.weight" for kind in ("gate", "up", "down")]
    gates, ups, downs = ([apart.pop(name.format(index)) for index in range(4)] for name in names)
    joined = {"gate_up_proj": torch.cat([torch.stack(gates), torch.stack(ups)], 1), "down_proj": torch.stack(downs)}
    apart.update({f"model.layers.1.mlp.experts.{kind}": tensor for kind, tensor in joined.items()})
    save_file(apart, tmp_path / "m.safetensors")
    shutil.copy(mixture_dir / "config.json", tmp_path)
    assert tensor_shapes(tmp_path) == tensor_shapes(mixture_dir)
    assert torch.equal(
        each_expert(load_file(tmp_path / "m.safetensors"), model_type="qwen3_moe")[names[1].format(2)], ups[2]
    )


def test_the_reference_takes_all_tensors_and_no_other(mixture_dir: Path) -> None:
    tensors, sequence = load(mixture_dir), np.arange(2, 9, dtype=np.int32)
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    plain = reference_logprobs(mixture_dir, sequence)
    assert np.array_equal(reference_logprobs(mixture_dir, sequence, tensors=tensors), plain)
    changed = reference_logprobs(mixture_dir, sequence, tensors={**tensors, name: -tensors[name]})
    assert np.abs(changed - plain).max() > 1e-3
    for wrong in ({**tensors, "model.layers.1.mlp.experts.9.down_proj.weight": tensors[name]}, {name: tensors[name]}):
        with pytest.raises(AssertionError, match=r"model\.layers\.1\.mlp.*must be in both the model and"):
            reference_logprobs(mixture_dir, sequence, tensors=wrong)


def test_weights_that_the_folder_lacks_are_named_at_the_start(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, eos_token_id=1
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "q_proj.bias" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightProofError, match="does not have, under this or another name") as raised:
        started(tmp_path)
    assert raised.value.tensor == "model.layers.0.self_attn.q_proj.bias"


def test_the_same_requests_give_the_same_bits(tied_model_dir: Path) -> None:
    requests = [
        GenerateRequest(input_ids=PROMPT[: 1 + i % 5], sampling=SamplingParams(max_tokens=6 + i, seed=i), num_samples=3)
        for i in range(6)
    ]

    def run() -> list[Generation]:
        engine = started(tied_model_dir)

        async def send_all() -> list[list[Generation]]:
            return list(await asyncio.gather(*map(engine.generate, requests)))

        samples = [sample for group in asyncio.run(send_all()) for sample in group]
        asyncio.run(engine.close())
        return samples

    for first, second in zip(run(), run(), strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tobytes() == second.logprobs.tobytes()


def test_requests_without_seeds_repeat_from_the_engines_seed(tied_model_dir: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        engine = started(tied_model_dir, TransformersOptions(seed=seed))
        samples = generate(engine, num_samples=8)
        asyncio.run(engine.close())
        return [sample.token_ids.tolist() for sample in samples]

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_samples_beyond_a_batch_wait_and_are_served(tied_model_dir: Path) -> None:
    engine = started(tied_model_dir, TransformersOptions(max_num_seqs=3))
    wide = started(tied_model_dir)
    narrow_samples = generate(engine, num_samples=8, seed=0)
    wide_samples = generate(wide, num_samples=8, seed=0)
    assert [s.token_ids.tolist() for s in narrow_samples] == [s.token_ids.tolist() for s in wide_samples]


def test_an_update_counts_as_a_restart_of_what_runs(engine: TransformersEngine, tied_model_dir: Path) -> None:
    request = long_request(engine)
    suite = TestTransformersEngine()

    async def update_midway() -> Generation:
        running = await begin(engine, request)
        await suite.send(engine, load(tied_model_dir), version=1)
        return (await running)[0]

    assert asyncio.run(update_midway()).num_preempted == 1
    assert generate(engine)[0].num_preempted == 0


def load(model_dir: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(model_dir / "model.safetensors")
    return tensors


TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts": 4}),
        ("Glm4MoeForCausalLM", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "attention_bias": True}),
    ],
)
def test_mixtures_take_updates_of_single_experts(
    architecture: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses the checksum for GPUs."""
    monkeypatch.setattr("rl_core.weights.digests._own_kind", lambda tensor: "sums")
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model_class(model_class.config_class(**TINY, **sizes)).float().save_pretrained(tmp_path / "old")
    tensors = perturbed(load(tmp_path / "old"), scale=0.05)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    save_file(tensors, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    sequence = np.arange(2, 30, dtype=np.int32)
    engine = started(tmp_path / "old", TransformersOptions())
    before = asyncio.run(engine.score([sequence]))[0].token_logprobs
    update = TensorTransport().pack(tensors, version=1, tied={})

    receipt = asyncio.run(engine.update_weights(update))

    assert {checksum.partition(":")[0] for checksum in receipt.arrived.values()} == {"sums"}
    assert check_receipt(update, receipt, tolerances=ProofTolerances()) < 1e-6
    after = asyncio.run(engine.score([sequence]))[0].token_logprobs
    expected = token_logprobs(reference_logprobs(tmp_path / "new", sequence), sequence)
    np.testing.assert_allclose(after[1:], expected, atol=1e-5)
    assert np.abs(after - before).max() > 1e-2
    asyncio.run(engine.close())


@pytest.fixture
def sleepy(tied_model_dir: Path) -> Iterator[TransformersEngine]:
    """Start an engine that can sleep on a CPU; it frees the same memory as on a GPU."""
    engine = started(tied_model_dir, OPTIONS)
    engine._stepper._traits = replace(engine.traits, can_sleep=True)
    yield engine
    asyncio.run(engine.close())


def weight_bytes(engine: TransformersEngine) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in engine._stepper._model.parameters())


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_has_slept_serves_as_before_once_it_has_weights(
    level: Literal[1, 2], sleepy: TransformersEngine, tied_model_dir: Path
) -> None:
    tensors, before, held = load(tied_model_dir), generate(sleepy, num_samples=2, seed=4), weight_bytes(sleepy)
    asyncio.run(sleepy.sleep(level))
    assert weight_bytes(sleepy) == (held if level == 1 else 0)
    with refuses("is asleep"):
        generate(sleepy)
    asyncio.run(sleepy.wake())
    if level == 2:
        with refuses("publish all weights first"):
            generate(sleepy)
        with refuses("drops its weights, so it cannot serve"):
            asyncio.run(sleepy.score([PROMPT]))
        told = AdapterUpdate(rank=1, base=digest_tensors(tensors))
        with refuses("an adapter has no base"):
            adapter = TensorTransport().pack({}, version=1, tied=TIED_HEAD, adapter=told)
            asyncio.run(sleepy.update_weights(adapter))
        asyncio.run(sleepy.sleep(1))  # only an update restores its weights
        asyncio.run(sleepy.wake())
        with refuses("slept at level 2"):
            generate(sleepy)
        update = TensorTransport().pack(tensors, version=0, tied=TIED_HEAD)
        receipt = asyncio.run(sleepy.update_weights(update))
        assert check_receipt(update, receipt, tolerances=ProofTolerances()) < 1e-6
    for first, second in zip(before, generate(sleepy, num_samples=2, seed=4), strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tolist() == second.logprobs.tolist()


def test_weights_that_no_update_brought_back_are_not_proven(sleepy: TransformersEngine, tied_model_dir: Path) -> None:
    update = TensorTransport().pack(load(tied_model_dir), version=1, tied=TIED_HEAD)
    asyncio.run(sleepy.sleep(2))
    asyncio.run(sleepy.wake())
    with PassingChecksums({}) as sums:
        assert len(list(sums.passing(update.location.tensors.items()))) == len(update.location.tensors)
        receipt = sleepy._stepper._receipt(update, sums, {})
    with pytest.raises(WeightProofError, match="the engine serves something else") as raised:
        check_receipt(update, receipt, tolerances=ProofTolerances())
    assert raised.value.tensor == next(iter(update.digests))


def test_closing_fails_who_waits_and_may_be_repeated(tied_model_dir: Path) -> None:
    engine = started(tied_model_dir)

    request = long_request(engine)

    async def close_midway() -> BaseException | list[Generation]:
        running = await begin(engine, request)
        await engine.close()
        await engine.close()
        return (await asyncio.gather(running, return_exceptions=True))[0]

    error = asyncio.run(close_midway())
    assert isinstance(error, EngineError)
    assert "closed" in str(error)
    with pytest.raises(NotReadyError, match="closed"):
        generate(engine)


def test_the_code_of_a_model_folder_is_neither_run_nor_asked_about(tied_model_dir, tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    folder = tmp_path / "model"
    shutil.copytree(tied_model_dir, folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "stranger",
        "architectures": ["Stranger"],
    }
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    with pytest.raises(EngineError, match="model"):
        started(folder)
    assert asked == []
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_gives_the_text_of_a_response(tied_model_dir: Path) -> None:
    tokenizer = PromptTokenizer.load(tied_model_dir)
    ids = np.random.default_rng(0).integers(0, 32, 200)
    for skip in (True, False):
        text = tokenizer.response_text([2, 3], skip_special_tokens=skip)
        (whole,) = tokenizer.decode([ids], skip_special_tokens=skip)
        assert text.feed(ids.tolist()) + text.finish() == whole


BFLOAT16 = TransformersOptions(max_model_len=128, dtype="bfloat16")


def chosen(model_dir: Path, options: TransformersOptions = BFLOAT16) -> tuple[str, str]:
    """Return the attention and the way to advance batches that an engine chooses."""
    stepper = TransformersStepper(model_dir, options)
    return str(stepper._model.config._attn_implementation), stepper._way


@pytest.mark.parametrize("options", [OPTIONS, BFLOAT16], ids=["float32", "bfloat16"])
def test_kernels_and_batches_are_chosen_by_their_numbers(
    tied_model_dir: Path, options: TransformersOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(tied_model_dir, options) == ("sdpa", "cached")
    right, padded = transformers_stepper.sdpa_attention_forward, transformers_stepper._padded

    def unscaled(*args: Any, scaling: float, **others: Any) -> Any:
        return right(*args, scaling=2 * scaling, **others)

    def unmasked(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = padded(*args)
        return ids, torch.ones_like(mask)

    with monkeypatch.context() as patch:
        patch.setattr(transformers_stepper, "sdpa_attention_forward", unscaled)
        assert chosen(tied_model_dir, options)[0] == "eager"
    with monkeypatch.context() as patch:
        patch.setattr(transformers_stepper, "_padded", unmasked)
        assert chosen(tied_model_dir, options)[1] == "alone"


def test_attention_that_is_the_only_one_stays(tied_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no eager attention")

    monkeypatch.setattr(transformers.PreTrainedModel, "set_attn_implementation", refuse)
    assert chosen(tied_model_dir) == ("sdpa", "cached")


def test_a_folder_does_not_choose_kernels(tied_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tied_model_dir, tmp_path / "named")
    config = json.loads((tmp_path / "named" / "config.json").read_text())
    config |= {"attn_implementation": "flex_attention", "_attn_implementation": "flex_attention"}
    (tmp_path / "named" / "config.json").write_text(json.dumps(config | {"experts_implementation": "batched_mm"}))
    stepper = TransformersStepper(tmp_path / "named", OPTIONS)
    assert stepper._model.config._attn_implementation == "sdpa"
    assert stepper._model.config._experts_implementation != "batched_mm"


@pytest.mark.parametrize("way", ["padded", "alone"])
def test_batches_without_a_cache_give_the_same_tokens_and_scores(
    way: Literal["padded", "alone"], tied_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cache = started(tied_model_dir)
    monkeypatch.setattr(transformers_stepper, "_choose_way", lambda _: way)
    without = started(tied_model_dir)
    rows = [PROMPT, np.array([7, 3], dtype=np.int32)]
    texts = [generate(engine, num_samples=3, seed=4) for engine in (with_cache, without)]
    assert [one.token_ids.tolist() for one in texts[0]] == [one.token_ids.tolist() for one in texts[1]]
    scores = [asyncio.run(engine.score(rows)) for engine in (with_cache, without)]
    for one, other in zip(*scores, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    for engine in (with_cache, without):
        asyncio.run(engine.close())
