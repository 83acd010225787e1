"""vLLM's models of images, with our pixel values: its own processors are neither loaded nor asked.

vLLM takes an image as *features*: the model's inputs for it, the place of its tokens, and an identifier under which its
caches keep what they compute from it. `ImageFeatures` makes them from the pixel values that the learner uses too.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BatchFeature
from transformers.utils import is_torchvision_available
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_error
from vllm import ModelRegistry
from vllm.model_executor.models import registry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import InputProcessingContext
from vllm.multimodal.registry import MultiModalRegistry
from vllm.platforms import current_platform
from vllm.v1.core.sched import output

from rl_core.errors import EngineError
from rl_core.files import read_json_object
from rl_core.images import ImageProcessor, encode_image
from rl_rollout.engines.images import PlacedImage
from rl_rollout.engines.stepper import Sample

TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
"""Modules that transformers' image processors import, which vLLM's models import for other names."""


class _NoTorchvision(ModuleType):
    """Stands for a module of torchvision while a model is imported. Whatever uses it fails."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"vLLM's model uses {self.__name__}.{name}, and torchvision is not installed. Use the transformers engine."
        )


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let vLLM's models of images be imported where torchvision is missing, as beside torch's CPU build.

    They import transformers' image processors for a function and types, and these import torchvision. Nothing in them
    runs, so that an empty module is enough.
    """
    if is_torchvision_available() or find_spec("torchvision") is not None:
        yield
        return
    modules = {name: _NoTorchvision(name) for name in (*TORCHVISION, f"{TORCHVISION[-1]}.functional")}
    vars(modules[TORCHVISION[-1]])["functional"] = modules[f"{TORCHVISION[-1]}.functional"]
    verbosity = get_verbosity()
    set_verbosity_error()  # else it asks to install torchvision
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        set_verbosity(verbosity)


def register_architectures(model_dir: Path) -> None:
    """Register a folder's model of images with its class.

    vLLM would otherwise import it in a child process to inspect it, which fails without torchvision.
    """
    config = read_json_object(model_dir / "config.json", error=EngineError)
    for name in config.get("architectures") or () if "vision_config" in config else ():
        model = ModelRegistry.models.get(name)
        if isinstance(model, registry._LazyRegisteredModel):
            ModelRegistry.register_model(name, model.load_model_cls())


_load_as_vllm = registry._LazyRegisteredModel.load_model_cls


def serve_our_images() -> None:
    """Make vLLM in this process import its models of images, ask none of its processors, and keep our features."""
    registry._LazyRegisteredModel.load_model_cls = _load_model_class
    MultiModalRegistry.create_processor = _create_processor
    output.strip_covered_mm_data = _all_features


def _load_model_class(model: Any) -> Any:
    with without_torchvision():
        return _load_as_vllm(model)


def _all_features(features: list[MultiModalFeatureSpec], *_: Any, **__: Any) -> list[MultiModalFeatureSpec]:
    """Keep the pixel values of images whose tokens are cached. A sample that is preempted later needs them again."""
    return features


def _create_processor(_registry: MultiModalRegistry, model_config: Any, **_: Any) -> Any:
    """Return vLLM's processor of a model, without a processor or tokenizer of transformers in it."""
    factory = MULTIMODAL_REGISTRY._get_model_cls(model_config)._processor_factory

    class Limits(factory.info):  # type: ignore[misc, name-defined]
        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            return dict.fromkeys(mm_counts, seq_len)

    class Processor(factory.processor):  # type: ignore[misc, name-defined]
        requires_tokenizer = False

    info = Limits(InputProcessingContext(model_config, None))
    return Processor(info, factory.dummy_inputs(info))


class ImageFeatures:
    """Makes vLLM's features of the images of samples."""

    def __init__(self, model_config: Any) -> None:
        """Ask the model which inputs it takes.

        Raises:
            EngineError: It takes no images, or other inputs for them, or vLLM computes them wrongly here.
        """
        if not model_config.is_multimodal_model:
            raise EngineError(f"{model_config.model}: vLLM's model takes no images. Leave out image_folder.")
        if model_config.is_mm_prefix_lm and current_platform.is_cpu():
            raise EngineError(
                f"{model_config.model}: each token of an image attends to all tokens of the image, which vLLM does not "
                "compute on CPUs. Use the transformers engine, or a GPU."
            )
        self._dtype: torch.dtype = model_config.dtype
        self._processor: Any = MULTIMODAL_REGISTRY.create_processor(model_config)
        pixels = ImageProcessor.load(Path(model_config.model)).pixels(encode_image(np.zeros((64, 64, 3), np.uint8)))
        try:
            self._inputs(pixels)
        except Exception as error:  # vLLM's own lookups
            raise EngineError(
                f"{model_config.model}: vLLM's model does not take {', '.join(pixels)} of transformers' image "
                f"processor ({type(error).__name__}: {error}). Use the transformers engine."
            ) from error

    def of(self, sample: Sample, version: int) -> list[MultiModalFeatureSpec]:
        """Return the features of a sample's images. Caches share those of equal images and versions only.

        Args:
            sample: The sample.
            version: Version of the weights that compute it first.
        """
        return [self._feature(image, f"{image.span.digest}-{version}") for image in sample.images]

    def _feature(self, image: PlacedImage, identifier: str) -> MultiModalFeatureSpec:
        is_whole = bool(image.is_embedded.all())
        mask = None if is_whole else torch.from_numpy(image.is_embedded)
        return MultiModalFeatureSpec(
            data=self._inputs(image.pixels),
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=image.span.start, length=image.span.length, is_embed=mask),
            mm_hash=identifier,
        )

    def _inputs(self, pixels: Mapping[str, NDArray[Any]]) -> MultiModalKwargsItem:
        found = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in pixels.items()}
        found = {name: one.to(self._dtype) if one.is_floating_point() else one for name, one in found.items()}
        if "pixel_values" in found:  # of Gemma 3, which vLLM counts itself
            found.setdefault("num_patches", torch.tensor([len(found["pixel_values"])]))
        inputs = BatchFeature(found)
        config = self._processor._get_mm_fields_config(inputs, {})
        (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, config)["image"]
        return item
