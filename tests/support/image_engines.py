"""Prompts with images for a tiny model, and what transformers computes for them."""

import asyncio
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rl_core.data import FloatArray, ImageSpan, IntArray
from rl_core.images import ImageProcessor, ImageStore, encode_image, joined_pixels
from rl_core.weights import (
    AdapterUpdate,
    Canary,
    ProofTolerances,
    PublishReport,
    TensorTransport,
    WeightUpdate,
    digest_tensors,
    folder_views,
    publish_weights,
)
from rl_rollout.engines.protocol import GenerateRequest, RolloutEngine, SamplingParams
from rl_rollout.engines.weight_checks import place_in_layers
from rl_rollout.testing.reference_model import make_adapter, merged

SIZES = ((56, 84), (56, 84), (112, 56))
"""Height and width of each image. The first two have the same tokens."""


class ImagePrompts:
    """Prompts with some of three images.

    Attributes:
        name: The family.
        model_dir: The model's folder.
        store: The images.
        processor: The model's processor.
    """

    def __init__(self, model_dir: Path, image_folder: Path) -> None:
        self.name, self.model_dir = model_dir.parent.name.rstrip("0123456789"), model_dir
        self.store, self.processor = ImageStore(image_folder), ImageProcessor.load(model_dir)
        self._random = np.random.default_rng(0)
        self._digests = [self.add(*size) for size in SIZES]
        options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
        self._model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, **options, trust_remote_code=False)
        self._weights = load_file(model_dir / "model.safetensors")

    def add(self, height: int = 56, width: int = 56) -> str:
        """Keep another image; return its digest."""
        return self.store.put(encode_image(self._random.integers(0, 256, (height, width, 3), dtype=np.uint8)))

    def with_images(self, *images: int) -> tuple[IntArray, tuple[ImageSpan, ...]]:
        """Return the tokens of a prompt with these images, and where they lie."""
        parts, spans = [np.arange(30, 38, dtype=np.int32)], []
        for image in images:
            tokens = self.processor.tokens(self.store.get(self._digests[image]))
            start = sum(map(len, parts))
            spans.append(ImageSpan(digest=self._digests[image], start=start, length=len(tokens)))
            parts += [tokens, np.arange(50, 54, dtype=np.int32)]
        return np.concatenate([*parts, np.arange(60, 66, dtype=np.int32)]), tuple(spans)

    def pixels(self, spans: tuple[ImageSpan, ...]) -> Mapping[str, Any]:
        """Return the joined pixel values of images."""
        return joined_pixels([self.processor.pixels(self.store.get(span.digest)) for span in spans])

    def reference(self, ids: IntArray, spans: tuple[ImageSpan, ...]) -> FloatArray:
        """Return [T - 1] logprobs of the tokens after the first, by transformers alone."""
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        types = (tokens == self.processor.token_id).long()
        taken = {*inspect.signature(self._model.forward).parameters} & {"mm_token_type_ids", "token_type_ids"}
        inputs = {name: torch.from_numpy(array) for name, array in self.pixels(spans).items()}
        inputs |= dict.fromkeys(taken, types) if spans else {}
        with torch.inference_mode():
            logprobs = self._model(input_ids=tokens, use_cache=False, **inputs).logits[0].float().log_softmax(-1)
        found: FloatArray = logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()
        return found

    def check(self, engine: RolloutEngine, *, within: float) -> None:
        """Compare scores and samples with transformers, for texts and for one or two images."""
        for images in ((), (0,), (1,), (0,), (2, 0)):
            ids, spans = self.with_images(*images)
            (scores,) = asyncio.run(engine.score([ids], images=[spans] if spans else ()))
            np.testing.assert_allclose(scores.token_logprobs[1:], self.reference(ids, spans), atol=within)
            sampling = SamplingParams(max_tokens=4, seed=3)
            request = GenerateRequest(input_ids=ids, images=spans, sampling=sampling, num_samples=3)
            for sample in asyncio.run(engine.generate(request)):
                (strays,) = np.nonzero(sample.token_ids == self.processor.token_id)
                end = int(strays[0]) if len(strays) else len(sample.token_ids)  # transformers alone refuses them
                expected = self.reference(np.concatenate([ids, sample.token_ids[:end]]), spans)[len(ids) - 1 :]
                np.testing.assert_allclose(sample.logprobs[:end], expected, atol=within)

    def check_updates(self, engine: RolloutEngine) -> None:
        """Publish weights three times with a canary of text and image, and compare what the engine serves."""
        for version in (1, 2, 3):
            report = self.publish(engine, version)
            assert report.num_tensors >= len(self._weights)
            assert report.canary_max_diff < 1e-4
            self.check(engine, within=1e-4)

    def publish(self, engine: RolloutEngine, version: int) -> PublishReport:
        """Publish `update` with proof, and a canary of text and image."""
        update = self.update(version)
        rows = [self.with_images(0), self.with_images()]
        logprobs = [np.pad(self.reference(ids, spans), (1, 0)) for ids, spans in rows]
        canary = Canary(sequences=[ids for ids, _ in rows], logprobs=logprobs, images=[spans for _, spans in rows])
        return asyncio.run(publish_weights(update, [engine], canary=canary, tolerances=ProofTolerances()))

    def update(self, version: int) -> WeightUpdate:
        """Change every tensor, also of the vision tower, here and in the returned update."""
        random = torch.Generator().manual_seed(version)
        tensors = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=random) for name, tensor in self._weights.items()
        }
        self.load(tensors)
        return TensorTransport().pack(tensors, version=version, tied={})

    def adapter(self, version: int, *, rank: int) -> WeightUpdate:
        """Change the query matrices of the language layers, here and by an adapter with the names of the class."""
        folder = {name: one for name, one in self._weights.items() if name.endswith("q_proj.weight")}
        of_class = {
            "model.language_model.layers." + place_in_layers(name): name for name in folder if "vis" not in name
        }
        matrices = {name: folder[own] for name, own in of_class.items()}
        adapter = make_adapter(matrices, rank=rank, seed=version, kinds=("q_proj",))
        self.load()
        self.load({of_class[name]: one for name, one in merged(matrices, adapter).items()})
        base = digest_tensors(self._weights)
        return TensorTransport().pack(adapter, version=version, tied={}, adapter=AdapterUpdate(rank=rank, base=base))

    def check_adapter(self, engine: RolloutEngine, *, rank: int) -> None:
        """Serve an adapter that names modules as the class does, and compare what the engine computes."""
        update = self.adapter(1, rank=rank)
        receipt = asyncio.run(engine.update_weights(update))
        assert update.digests
        assert {*update.digests} <= {*receipt.live}
        self.check(engine, within=1e-4)
        self.load()

    def load(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Change the weights of `reference`, by default to the folder's."""
        live = folder_views(self._model, self._model.state_dict())
        for name, tensor in (tensors or self._weights).items():
            live[name].copy_(tensor)
