"""Policies with images: the learner against transformers' class, row by row, in float32."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from families import make_family
from image_families import IMAGE_FAMILIES, make_image_family
from peft import PeftModel
from safetensors.torch import load_file

from rl_core import Batch, Ragged, RowKey
from rl_core.data import FloatArray, ImageSpan, IntArray, offsets_of
from rl_core.errors import DataError, SettingsError, ShapeError
from rl_core.images import ImageProcessor, ImageStore, encode_image
from rl_core.weights import folder_views
from rl_distill import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.checkpoints.merged_folder import merge_adapter
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.megatron.any_model.chunk import TransformersModel
from rl_distill.megatron.any_model.images import joined_inputs
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner, MegatronReference
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.objectives.policy import supervised_objective

OPTIONS = LearnerOptions(
    learning_rate=1e-3, micro_batch_tokens=64, shared_prefix_tokens=4, weight_decay=0.0, num_threads=1
)
CLOSE = 2e-5
"""Maximum difference of logprobs, which are about -10, in nats; most families stay below 1e-5."""
IN_CI = ("qwen2_5_vl", "gemma3")
PADDED = ("gemma3", "qwen3_5")
"""Families whose attention among an image's tokens is not causal, or whose layers keep a state."""
families = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.soak) for name in IMAGE_FAMILIES]
)


class Rows:
    """Rows of three prompts: a text, one with an image, and one with two; two rows each, with one prompt's tokens.

    Attributes:
        batch: The rows, which share prefixes with images.
        store: Images of the rows.
        processor: The policy's processor.
    """

    def __init__(self, policy: Path, folder: Path) -> None:
        self.processor, self.store = ImageProcessor.load(policy), ImageStore(folder)
        random = np.random.default_rng(0)
        self._images = [
            self.store.put(encode_image(random.integers(0, 256, (height, width, 3), dtype=np.uint8)))
            for height, width in ((56, 84), (84, 56), (56, 56))
        ]
        one, two, three = self._images
        self.batch = self.make([((), 9), ((one,), 5), ((two, three), 4), ((), 6), ((one,), 7), ((two, three), 3)])

    def make(self, rows: Sequence[tuple[Sequence[str], int]], *, num_prompts: int = 3) -> Batch:
        """Return rows with these images and lengths of the response; rows of a prompt have the same prompt."""
        random, ids, images = np.random.default_rng(0), [], []
        prompts: dict[int, tuple[IntArray, list[ImageSpan]]] = {}
        for row, (digests, length) in enumerate(rows):
            if row % num_prompts not in prompts:
                prompts[row % num_prompts] = self._prompt(digests, random)
            prompt, spans = prompts[row % num_prompts]
            response = random.integers(20, 200, length).astype(np.int32)
            ids.append(np.concatenate([prompt, response]))
            images.append([[span.digest, span.start, span.length] for span in spans])
        offsets = offsets_of(np.array([len(row) for row in ids]))
        mask = np.concatenate(
            [np.arange(len(row)) >= len(row) - length for row, (_, length) in zip(ids, rows, strict=True)]
        )
        columns = {
            "input_ids": np.concatenate(ids),
            "loss_mask": mask,
            "loss_weights": (mask / mask.sum()).astype(np.float32),
        }
        keys = [RowKey(f"prompt{row % num_prompts}", row // num_prompts, 0) for row in range(len(rows))]
        return Batch(
            keys,
            {name: Ragged(values, offsets) for name, values in columns.items()},
            extras=[{"images": of_row} if of_row else {} for of_row in images],
        )

    def _prompt(self, digests: Sequence[str], random: np.random.Generator) -> tuple[IntArray, list[ImageSpan]]:
        parts, spans = [random.integers(20, 200, 5).astype(np.int32)], []
        for digest in digests:
            tokens = self.processor.tokens(self.store.get(digest))
            spans.append(ImageSpan(digest=digest, start=sum(map(len, parts)), length=len(tokens)))
            parts += [tokens, random.integers(20, 200, 3).astype(np.int32)]
        return np.concatenate(parts), spans


def class_of(folder: Path) -> Any:
    """Return the class's own model, which computes attention by its own code."""
    from transformers import AutoModelForImageTextToText

    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=False, **options).eval()


def class_logprobs(model: Any, rows: Rows, batch: Batch, row: int) -> torch.Tensor:
    ids = torch.from_numpy(batch.ragged("input_ids")[row].astype(np.int64))
    parts = [rows.processor.pixels(rows.store.get(span.digest)) for span in batch.images[row]]
    inputs = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in (parts or [{}])[0]}
    if parts:
        types = (ids == rows.processor.token_id).long()[None]
        inputs.pop("num_patches", None)
        kind = model.config.model_type
        if kind == "gemma3" or hasattr(model.model, "get_rope_index"):
            inputs |= {"token_type_ids" if kind == "gemma3" else "mm_token_type_ids": types}
    logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0, :-1].float()
    return torch.nn.functional.pad(torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0], (1, 0))


def class_step(model: Any, rows: Rows, batch: Batch) -> tuple[FloatArray, float, Mapping[str, torch.Tensor]]:
    """Return logprobs, the loss and each gradient by the folder's names."""
    model.zero_grad()
    of_rows = [class_logprobs(model, rows, batch, row) for row in range(len(batch))]
    weights = batch.ragged("loss_weights")
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
    return tmp_path_factory.mktemp("image families")


@pytest.fixture
def folder(name: str, folders: Path) -> Path:
    if not (folders / name).exists():
        make_image_family(name, folders / name)
    return folders / name


@pytest.fixture
def rows(folder: Path, tmp_path: Path) -> Rows:
    return Rows(folder, tmp_path / "images")


@pytest.fixture
def options(rows: Rows) -> LearnerOptions:
    return replace(OPTIONS, image_folder=rows.store.folder)


@pytest.fixture
def learner(folder: Path, options: LearnerOptions) -> Iterator[MegatronLearner]:
    learner = MegatronLearner(folder, options)
    yield learner
    learner.close()


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(1.0, abs(expected))


@families
@pytest.mark.parametrize("trains_vision", [False, True])
def test_a_step_is_that_of_the_class(
    name: str, trains_vision: bool, folder: Path, rows: Rows, options: LearnerOptions
) -> None:
    """Texts, rows with one image and rows with two lie in one micro-batch."""
    learner = MegatronLearner(folder, replace(options, trains_vision=trains_vision, micro_batch_tokens=200))
    batch, model = rows.batch, class_of(folder)
    expected, loss, gradients = class_step(model, rows, batch)
    own_model = model_of(learner)
    assert own_model.is_packed == (name not in PADDED)
    logprobs = np.abs(learner.logprobs(batch).values - expected).max()
    assert logprobs <= CLOSE
    result = learner.train_step(batch, supervised_objective)
    assert relative(result.loss, loss) <= 1e-5
    trained = {n: p for n, p in own_model.inner.named_parameters() if p.requires_grad}
    found = folder_views(own_model.inner, {n: p.main_grad for n, p in trained.items()})
    vision = {tensor for tensor in gradients if "vis" in tensor or "multi_modal" in tensor}
    assert vision
    assert vision <= found.keys() if trains_vision else not vision & found.keys()
    expected_of = {tensor: gradient for tensor, gradient in gradients.items() if trains_vision or tensor not in vision}
    norm = float(torch.stack([gradient.norm() for gradient in expected_of.values()]).norm())
    assert relative(result.grad_norm, norm) <= 1e-5
    scale = max(result.grad_norm, OPTIONS.clip_grad)  # they are clipped in place
    for tensor, gradient in expected_of.items():
        difference = (found[tensor].float() * scale / OPTIONS.clip_grad - gradient).abs().max()
        assert float(difference) <= 1e-4 * float(gradient.abs().max()) + 1e-6, tensor
    if own_model.shares_prefixes:
        assert result.computed_tokens < len(batch.ragged("input_ids").values)
    learner.close()


@families
def test_weights_are_exported_with_the_processor_and_resumed(
    name: str, folder: Path, rows: Rows, learner: MegatronLearner, options: LearnerOptions, tmp_path: Path
) -> None:
    batch, model = rows.batch, class_of(folder)
    untrained, stored = learner.export_weights(), folder_views(model, model.state_dict())
    assert untrained.keys() | learner.tied.keys() == stored.keys()
    assert different_tensors(stored, untrained) == []
    learner.train_step(batch, supervised_objective)
    learner.save(tmp_path / "saved")
    policy = tmp_path / "saved" / "policy"
    companions = [path for path in folder.iterdir() if path.suffix != ".safetensors" and path.name != "config.json"]
    assert len(companions) >= 5
    assert all((policy / path.name).read_bytes() == path.read_bytes() for path in companions)
    exported, trained = Rows(policy, rows.store.folder), class_of(policy)
    other = MegatronLearner(policy, options, name="exported")
    expected = torch.cat([class_logprobs(trained, exported, batch, row) for row in range(len(batch))])
    assert np.abs(learner.logprobs(batch).values - expected.detach().numpy()).max() <= CLOSE
    assert np.abs(other.logprobs(batch).values - expected.detach().numpy()).max() <= CLOSE
    resumed = MegatronLearner(folder, options, name="other")
    resumed.load(tmp_path / "saved")
    first, second = (one.train_step(batch, supervised_objective) for one in (learner, resumed))
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert different_tensors(resumed.export_weights(), learner.export_weights()) == []
    other.close()
    resumed.close()


@pytest.fixture
def name() -> str:
    """The family of tests of one family."""
    return "qwen2_5_vl"


def test_two_ranks_compute_what_one_computes(folder: Path, rows: Rows, options: LearnerOptions) -> None:
    ranks, results = LearnerRanks(ParallelOptions(ranks=2, distributed_optimizer=True), num_threads=1), []
    try:
        for of_ranks in (None, ranks):
            learner = MegatronLearner(folder, replace(options, trains_vision=True), ranks=of_ranks)
            results.append([learner.train_step(rows.batch, supervised_objective) for _ in range(3)])
            learner.close()
    finally:
        ranks.close()
    for one, two in zip(*results, strict=True):
        assert relative(two.loss, one.loss) <= 1e-5
        assert relative(two.grad_norm, one.grad_norm) <= 1e-5


def with_images(batch: Batch, images: Sequence[Sequence[ImageSpan]]) -> Batch:
    """Return the rows with other images among the same tokens."""
    extras = [{"images": [[span.digest, span.start, span.length] for span in of_row]} for of_row in images]
    return Batch(batch.keys, {name: batch[name] for name in batch.names}, extras=extras)


def test_prefixes_are_shared_only_where_tokens_and_images_agree(
    folder: Path, rows: Rows, learner: MegatronLearner
) -> None:
    """Two images of one size have the same tokens. An image of a shared prefix is computed once."""
    (one,) = rows.batch.images[1]
    other = rows.store.put(encode_image(np.zeros((56, 84, 3), dtype=np.uint8)))
    alike = rows.make([((one.digest,), 5), ((one.digest,), 7)], num_prompts=1)
    different = with_images(alike, [[one], [replace(one, digest=other)]])
    num_tokens, num_prompt = len(alike.ragged("input_ids").values), one.start + one.length + 3
    model = class_of(folder)
    for batch in (alike, different):
        expected = torch.cat([class_logprobs(model, rows, batch, row) for row in range(2)]).detach().numpy()
        assert np.abs(learner.logprobs(batch).values - expected).max() <= CLOSE
    assert learner.train_step(alike, supervised_objective).computed_tokens == num_tokens - num_prompt
    assert learner.train_step(different, supervised_objective).computed_tokens == num_tokens - one.start


def test_an_image_of_a_group_is_processed_once(
    rows: Rows, learner: MegatronLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    pixels = ImageProcessor.pixels
    monkeypatch.setattr(ImageProcessor, "pixels", lambda self, data: (calls.append(len(data)), pixels(self, data))[1])
    learner.logprobs(rows.batch)
    learner.train_step(rows.batch, supervised_objective)
    assert len(calls) == 3


def squared_values(values: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, MetricSums]:
    return (values.square() * micro.columns["loss_weights"]).sum(), {}


def test_a_critic_and_a_reference_see_images(
    folder: Path, rows: Rows, learner: MegatronLearner, options: LearnerOptions, tmp_path: Path
) -> None:
    (one,) = rows.batch.images[1]
    other = rows.store.put(encode_image(np.zeros((56, 84, 3), dtype=np.uint8)))
    batch = rows.make([((one.digest,), 5)], num_prompts=1)
    changed = with_images(batch, [[replace(one, digest=other)]])
    reference = MegatronReference(folder, options)
    assert np.array_equal(reference.logprobs(batch).values, learner.logprobs(batch).values)
    reference.close()
    critic = MegatronCritic(folder, options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model_of(critic, "critic").value_head.weight.normal_(generator=generator)  # type: ignore[union-attr]
    critic.train_step(batch, squared_values)
    critic.save(tmp_path / "critic")
    again = MegatronCritic(tmp_path / "critic" / "policy", options, name="again")
    values, of_changed = critic.values(batch).values, critic.values(changed).values
    assert np.array_equal(again.values(batch).values, values)
    assert not np.allclose(values[one.start + 1 :], of_changed[one.start + 1 :], atol=1e-3)
    critic.close()
    again.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: [], "must lie in one of the row's images; row ('prompt0', 0, 0) has 6 others, first at token 5"),
        (lambda one: [replace(one, length=one.length - 1)], "row ('prompt0', 0, 0) has 1 others, first at token 10"),
        (lambda one: [replace(one, start=one.start + 1)], "begin and end with a placeholder (token 3)"),
        (lambda one: [one, one], "row ('prompt0', 0, 0) with 19 tokens has one at [5, 11)"),
    ],
)
def test_placeholders_that_do_not_agree_are_refused(
    change: Callable[[ImageSpan], list[ImageSpan]], message: str, rows: Rows, learner: MegatronLearner
) -> None:
    (one,) = rows.batch.images[1]
    batch = rows.make([((one.digest,), 5)], num_prompts=1)
    with pytest.raises(ShapeError, match=re.escape(message)):
        learner.logprobs(with_images(batch, [change(one)]))


def test_an_image_that_needs_other_placeholders_is_missing_or_changed_is_named(
    folder: Path, rows: Rows, learner: MegatronLearner
) -> None:
    (one,) = rows.batch.images[1]
    batch = rows.make([((one.digest,), 5)], num_prompts=1)
    larger = rows.store.put(encode_image(np.zeros((112, 84, 3), dtype=np.uint8)))
    needs = re.escape(f"image {larger} needs 12 placeholders (token 3) in this policy; row ('prompt0', 0, 0) has 6")
    with pytest.raises(ShapeError, match=needs):
        learner.logprobs(with_images(batch, [[replace(one, digest=larger)]]))
    missing = "0" * 64
    with pytest.raises(DataError, match=missing):
        learner.logprobs(with_images(batch, [[replace(one, digest=missing)]]))
    (file,) = rows.store.folder.rglob(larger)
    file.write_bytes(b"other")
    with pytest.raises(DataError, match=f"{larger} is not the image that its name says"):
        learner.logprobs(with_images(batch, [[replace(one, digest=larger)]]))
    without_store = MegatronLearner(folder, OPTIONS, name="without")
    with pytest.raises(SettingsError, match="set image_folder to the folder of their ImageStore"):
        without_store.logprobs(batch)
    without_store.close()


def test_a_policy_of_texts_refuses_images(rows: Rows, options: LearnerOptions, tmp_path: Path) -> None:
    make_family("phi3", tmp_path / "phi3", vocab_size=512)
    learner = MegatronLearner(tmp_path / "phi3", options)
    with pytest.raises(ShapeError, match=r"row \('prompt1', 0, 0\) has an image; this policy has no vision tower"):
        learner.logprobs(rows.batch)
    learner.close()
    with pytest.raises(SettingsError, match="trains_vision = true needs a policy with a vision tower; Phi3ForCausalLM"):
        MegatronLearner(tmp_path / "phi3", replace(options, trains_vision=True))


@families
def test_an_adapter_changes_only_language_layers_and_is_that_of_peft(
    name: str, folder: Path, rows: Rows, options: LearnerOptions, tmp_path: Path
) -> None:
    batch, lora = rows.batch, LoraOptions(rank=4, alpha=8.0)
    learner = MegatronLearner(folder, replace(options, learning_rate=1e-2), lora=lora)
    for _ in range(2):  # B begins with 0
        learner.train_step(batch, supervised_objective)
    learner.save(tmp_path / "saved")
    modules = {one.removeprefix("base_model.model.").partition(".lora_")[0] for one in learner.export_adapter()}
    assert modules
    assert all("language_model.layers." in module for module in modules)
    model = PeftModel.from_pretrained(class_of(folder), tmp_path / "saved" / "adapter")
    own = torch.cat([class_logprobs(model.base_model.model, rows, batch, row) for row in range(len(batch))])
    found = learner.logprobs(batch).values
    assert np.abs(found - own.detach().numpy()).max() <= CLOSE
    merge_adapter(tmp_path / "saved" / "adapter", tmp_path / "merged", base=folder)
    for merged in (load_file(tmp_path / "merged" / "model.safetensors"), learner.export_weights()):
        other = class_of(folder)
        views = folder_views(other, other.state_dict())
        with torch.no_grad():
            for tensor, view in views.items():
                view.copy_(merged.get(tensor, view))
        served = torch.cat([class_logprobs(other, rows, batch, row) for row in range(len(batch))])
        assert np.abs(found - served.detach().numpy()).max() <= CLOSE
    learner.close()


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.soak)])
def test_recomputation_and_bfloat16_train_with_images(
    name: str, folder: Path, rows: Rows, options: LearnerOptions
) -> None:
    found = []
    for changes in ({}, {"recompute": "full"}, {"dtype": "bfloat16"}):
        learner = MegatronLearner(folder, replace(options, trains_vision=True, **changes))
        found.append(learner.train_step(rows.batch, supervised_objective))
        learner.close()
    plain, recomputed, rounded = found
    assert relative(recomputed.loss, plain.loss) <= 1e-6
    assert relative(recomputed.grad_norm, plain.grad_norm) <= 1e-6
    assert relative(rounded.loss, plain.loss) <= 0.05


def test_inputs_of_images_that_do_not_fit_together_are_refused() -> None:
    parts = [{"pixel_values": torch.zeros(1, num_parts, 3)} for num_parts in (2, 3)]
    with pytest.raises(SettingsError, match=r"several images must have one shape .* \[\(2, 3\), \(3, 3\)\]"):
        joined_inputs(parts)
