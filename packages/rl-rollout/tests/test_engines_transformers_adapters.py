"""The transformers engine with peft adapters: conformance, refusals, and faults that the proof names."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer
from safetensors.torch import load_file

from rl_core.errors import MissingExtraError, WeightProofError
from rl_core.weights import (
    AdapterUpdate,
    Canary,
    ProofTolerances,
    PublishReport,
    TensorDigest,
    TensorTransport,
    WeightUpdate,
    digest_tensors,
    publish_weights,
)
from rl_core.weights.digests import PEFT_PREFIX
from rl_rollout.engines.protocol import GenerateRequest, RolloutEngine, SamplingParams
from rl_rollout.engines.transformers import TransformersEngine, TransformersOptions
from rl_rollout.engines.transformers_adapters import NAME, ModelAdapters
from rl_rollout.engines.transformers_stepper import TransformersStepper
from rl_rollout.testing import AdapterConformance, begin, generate, refuses
from rl_rollout.testing.reference_model import PROMPT, TIED_HEAD, canary_of, long_request, make_adapter, merged
from rl_rollout.testing.update_checks import SEQUENCE

RANK = 4
KINDS = ("q_proj", "v_proj", "down_proj")
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def started(model_dir: Path, options: TransformersOptions) -> TransformersEngine:
    engine = TransformersEngine(model_dir, options)
    asyncio.run(engine.start())
    return engine


@pytest.fixture(scope="module")
def adapted_engine(tied_model_dir: Path) -> Iterator[TransformersEngine]:
    """Start an engine with adapters; each test leaves it serving tied_model_dir as version 0."""
    engine = started(tied_model_dir, TransformersOptions(max_model_len=128, max_lora_rank=RANK))
    yield engine
    asyncio.run(engine.close())


class TestTransformersAdapters(AdapterConformance):
    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, adapted_engine: TransformersEngine) -> RolloutEngine:
        return adapted_engine


# -- requirements and refusals


def test_room_for_adapters_needs_peft(tied_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rl_rollout.engines.transformers_adapters")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"max_lora_rank = 4 needs peft.*rl-rollout\[peft\]"):
        started(tied_model_dir, TransformersOptions(max_lora_rank=RANK))


def test_an_engine_without_room_refuses_adapters_and_requests_without_one(tied_model_dir: Path) -> None:
    engine = started(tied_model_dir, TransformersOptions(max_model_len=128))
    adapter = make_adapter(load_file(tied_model_dir / "model.safetensors"), rank=RANK, seed=1, kinds=KINDS)
    before = generate(engine, seed=1)[0].token_ids.tolist()
    with refuses("max_lora_rank = 0; found rank 4"):
        asyncio.run(AdapterConformance().publish(engine, tied_model_dir, adapter, version=1))
    request = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=2), adapter="base")
    with refuses("separate from its weights, which"):
        asyncio.run(engine.generate(request))
    assert generate(engine, seed=1)[0].token_ids.tolist() == before
    asyncio.run(engine.close())


def test_modules_that_are_not_named_and_the_head_are_refused(untied_model_dir: Path) -> None:
    options = TransformersOptions(max_lora_rank=RANK, lora_target_modules=("q_proj", "lm_head"))
    engine = started(untied_model_dir, options)
    base = load_file(untied_model_dir / "model.safetensors")
    for kind in ("v_proj", "lm_head"):
        with refuses("lora_target_modules"):
            adapter = make_adapter(base, rank=RANK, seed=1, kinds=("q_proj", kind))
            asyncio.run(AdapterConformance().publish(engine, untied_model_dir, adapter, version=1))
    adapter = make_adapter(base, rank=2, seed=1, kinds=("q_proj",))
    asyncio.run(AdapterConformance().prove(engine, untied_model_dir, adapter, version=1))
    asyncio.run(engine.close())


def test_low_precision_is_read_back_as_the_engine_holds_it(tied_model_dir: Path) -> None:
    engine = started(tied_model_dir, TransformersOptions(max_lora_rank=RANK, dtype="bfloat16"))
    adapter = make_adapter(load_file(tied_model_dir / "model.safetensors"), rank=RANK, seed=1)
    state = torch.get_rng_state()
    update, receipt = asyncio.run(AdapterConformance().publish(engine, tied_model_dir, adapter, version=1))
    assert torch.equal(state, torch.get_rng_state()), "an update must not change what a learner of this process draws"
    assert receipt.problems == ()
    assert update.digests
    assert all(np.isfinite(receipt.live[name]).all() for name in update.digests)
    asyncio.run(engine.close())


# -- faults


class Faults:
    """Faults of an engine's updates, at random places."""

    def __init__(self, engine: TransformersEngine, random: np.random.Generator) -> None:
        assert isinstance(engine._stepper, TransformersStepper)
        self.stepper, self.random = engine._stepper, random
        self.model = engine._stepper._model

    def layer(self, names: Tensors) -> Linear:
        """Draw a layer of an adapter."""
        modules = sorted({name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in names})
        layer = self.model.get_submodule(self.name_of(modules))
        assert isinstance(layer, Linear)
        return layer

    def name_of(self, names: list[str]) -> str:
        return names[int(self.random.integers(len(names)))]

    def element(self, tensor: torch.Tensor) -> torch.Tensor:
        """Draw an element, as a view to change."""
        flat = tensor.view(-1)
        index = int(self.random.integers(len(flat)))
        return flat[index : index + 1]

    def weight(self, names: Tensors) -> torch.Tensor:
        """Draw a layer's A or B."""
        layer = self.layer(names)
        return (layer.lora_A if self.random.integers(2) else layer.lora_B)[NAME].get_parameter("weight").data

    def flip_bit(self, names: Tensors) -> None:
        self.element(self.weight(names)).view(torch.int32).bitwise_xor_(1 << int(self.random.integers(31)))

    def change_sign(self, names: Tensors) -> None:
        self.element(self.weight(names)).neg_()

    def lose_one(self, names: Tensors) -> None:
        self.weight(names).zero_()

    def scale_twice(self, names: Tensors) -> None:
        self.layer(names).scaling[NAME] *= float(self.random.choice([0.5, 2.0, 16.0]))

    def scale_b(self, names: Tensors) -> None:
        self.layer(names).lora_B[NAME].get_parameter("weight").data.mul_(2)

    def change_base(self, names: Tensors) -> None:
        self.element(self.layer(names).base_layer.get_parameter("weight").data).add_(1.0)

    def change_elsewhere(self, _: Tensors) -> None:
        others = [name for name, _ in self.model.named_parameters() if "lora_" not in name and "base_layer" not in name]
        self.element(self.model.get_parameter(self.name_of(sorted(others))).data).add_(1.0)

    def merge(self, names: Tensors) -> None:
        self.layer(names).merge()

    def leave_out(self, names: Tensors) -> None:
        self.layer(names).enable_adapters(False)

    def serve_another(self, names: Tensors) -> None:
        layer = self.layer(names)
        layer.update_layer("other", r=2, lora_alpha=2, config=LoraConfig(r=2, lora_alpha=2))
        layer.set_adapter("other" if self.random.integers(2) else [NAME, "other"])

    def evict(self, _: Tensors) -> None:
        names = [name for name, module in self.model.named_modules() if isinstance(module, LoraLayer)]
        name = self.name_of(names)
        self.model.set_submodule(name, self.model.get_submodule(name).get_base_layer())

    def evict_all(self, _: Tensors) -> None:
        assert self.stepper._adapters is not None
        self.stepper._adapters._drop()

    def swap_layers(self, names: Tensors) -> None:
        kind, part = self.name_of(["q_proj", "v_proj"]), self.name_of(["lora_A", "lora_B"])
        first, second = (
            getattr(self.model.get_submodule(f"model.layers.{index}.self_attn.{kind}"), part)[NAME].weight.data
            for index in (0, 1)
        )
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


WRONG_BITS, OTHER_BASE = "serves something else: it was read back", "is not the one on which the adapter"
FAULTS: dict[str, tuple[Callable[[Faults, Tensors], None], str]] = {
    "one bit flipped": (Faults.flip_bit, WRONG_BITS),
    "one sign changed": (Faults.change_sign, WRONG_BITS),
    "one tensor not delivered": (Faults.lose_one, WRONG_BITS),
    "scaled twice": (Faults.scale_twice, "scales its adapter by"),
    "scaled in B": (Faults.scale_b, WRONG_BITS),
    "base changed under it": (Faults.change_base, OTHER_BASE),
    "base changed elsewhere": (Faults.change_elsewhere, OTHER_BASE),
    "merged": (Faults.merge, r"has merged the adapters \['published'\] into its base"),
    "disabled": (Faults.leave_out, "does not use its adapter"),
    "another one active": (Faults.serve_another, "serves the adapters .*'other'"),
    "evicted from a layer": (Faults.evict, "has no adapter"),
    "evicted": (Faults.evict_all, "has no adapter"),
    "in the place of another": (Faults.swap_layers, WRONG_BITS),
}
SEEDS = range(8)


class Published:
    """Two adapters of the tied model, with their updates and canaries."""

    def __init__(self, model_dir: Path) -> None:
        base = load_file(model_dir / "model.safetensors")
        self.base: dict[str, TensorDigest] = digest_tensors(base)
        self.adapters = [make_adapter(base, rank=RANK, seed=seed, kinds=KINDS) for seed in (1, 2)]
        self.canaries: list[Canary] = [canary_of(model_dir, merged(base, one), SEQUENCE) for one in self.adapters]

    def update(self, index: int, *, version: int) -> WeightUpdate:
        told = AdapterUpdate(rank=RANK, base=self.base)
        return TensorTransport().pack(self.adapters[index], version=version, tied=TIED_HEAD, adapter=told)

    async def publish(self, engine: RolloutEngine, index: int, *, version: int) -> PublishReport:
        update = self.update(index, version=version)
        return await publish_weights(update, [engine], canary=self.canaries[index], tolerances=ProofTolerances())


@pytest.fixture(scope="module")
def published(tied_model_dir: Path) -> Published:
    return Published(tied_model_dir)


@pytest.fixture
def served(adapted_engine: TransformersEngine, published: Published, tied_model_dir: Path) -> Iterator[Published]:
    """Serve the first adapter as version 1, and the base alone afterwards."""
    asyncio.run(published.publish(adapted_engine, 0, version=1))
    yield published
    AdapterConformance().restore(adapted_engine, tied_model_dir)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_update_is_named_and_the_next_one_heals_it(
    fault: str, adapted_engine: TransformersEngine, served: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it, words = FAULTS[fault]
    replace = ModelAdapters.replace
    base = Faults(adapted_engine, np.random.default_rng()).stepper._base()
    kept = {name: tensor.clone() for name, tensor in base.items()}
    for seed in SEEDS:
        index, faults = (seed + 1) % 2, Faults(adapted_engine, np.random.default_rng([seed, len(fault)]))

        def replace_wrongly(self: ModelAdapters, name: str, tensors: Tensors, faults: Faults = faults) -> None:
            replace(self, name, tensors)
            with torch.inference_mode(mode=False):
                break_it(faults, tensors)

        with monkeypatch.context() as patch:
            patch.setattr(ModelAdapters, "replace", replace_wrongly)
            with pytest.raises(WeightProofError, match=words):
                asyncio.run(served.publish(adapted_engine, index, version=2 + seed))
        if "base" in fault or fault == "merged":
            for name, tensor in faults.stepper._base().items():
                tensor.copy_(kept[name])
        asyncio.run(served.publish(adapted_engine, index, version=2 + seed))


def test_an_adapter_that_was_not_delivered_is_named(
    adapted_engine: TransformersEngine, served: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelAdapters, "replace", lambda *_: None)
    with pytest.raises(WeightProofError, match=WRONG_BITS) as caught:
        asyncio.run(served.publish(adapted_engine, 1, version=2))
    assert caught.value.tensor == next(iter(served.adapters[1]))


def test_a_skipped_version_is_named(
    adapted_engine: TransformersEngine, served: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = Faults(adapted_engine, np.random.default_rng()).stepper
    first = stepper.update_weights(served.update(0, version=1))
    monkeypatch.setattr(stepper, "update_weights", lambda _: first)
    with pytest.raises(WeightProofError, match="serves version 1; version 2 was published"):
        asyncio.run(served.publish(adapted_engine, 1, version=2))


def test_an_adapter_that_is_lost_after_the_update_is_found_by_the_canary(
    adapted_engine: TransformersEngine, served: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(adapted_engine, np.random.default_rng(0))
    admit = faults.stepper.admit
    for lose in (Faults.evict_all, Faults.evict, Faults.leave_out, Faults.scale_twice):
        asyncio.run(served.publish(adapted_engine, 0, version=1))

        def admit_late(samples: object, lose: Callable[[Faults, Tensors], None] = lose) -> None:
            lose(faults, served.adapters[0])
            admit(samples)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(faults.stepper, "admit", admit_late)
            with pytest.raises(WeightProofError, match="every tensor arrived and is live, but the engine's logprob"):
                asyncio.run(served.publish(adapted_engine, 1, version=2))


def test_what_the_last_adapter_computed_is_named_where_it_is_kept(
    adapted_engine: TransformersEngine, served: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = long_request(adapted_engine)
    monkeypatch.setattr(TransformersStepper, "_forget_old", lambda _: None)

    async def update_midway() -> None:
        running = await begin(adapted_engine, request)
        try:
            await served.publish(adapted_engine, 1, version=2)
        finally:
            running.cancel()

    with pytest.raises(WeightProofError, match="1 samples continue with the cache of version 1"):
        asyncio.run(update_midway())
