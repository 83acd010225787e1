"""Policies with images: the learner against transformers' class, row by row, in float32."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_families import IMAGE_FAMILIES, make_image_family

from rl_core import Batch, Ragged, RowKey
from rl_core.data import FloatArray, ImageSpan, IntArray, offsets_of
from rl_core.images import ImageProcessor, ImageStore, encode_image
from rl_core.weights import folder_views
from rl_distill import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.megatron.transformers_chunk import TransformersModel
from rl_distill.objectives.policy import supervised_objective

OPTIONS = LearnerOptions(
    learning_rate=1e-3, micro_batch_tokens=64, shared_prefix_tokens=4, weight_decay=0.0, num_threads=1
)
IN_CI = ("qwen2_5_vl",)
PADDED: tuple[str, ...] = ()
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
        inputs |= {"token_type_ids" if "gemma" in model.config.model_type else "mm_token_type_ids": types}
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


def model_of(learner: MegatronLearner, name: str = "policy") -> TransformersModel:
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
    assert logprobs <= 1e-5
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
