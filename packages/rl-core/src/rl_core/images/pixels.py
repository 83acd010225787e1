"""A model's processor of images: how many tokens an image takes in a text, and its pixel values.

The only file that knows transformers' processors. Nothing in a folder runs as code, and nothing is fetched.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data.records import ImageSpan, IntArray
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_core.images.store import blank_image, image_size, open_image
from rl_core.record_fields import converts_arguments

Pixels = Mapping[str, NDArray[Any]]
"""Inputs of a model by name, such as pixel_values and image_grid_thw, whose first axes join those of several images."""

PROBES = ((300, 40), (40, 300), (30, 20))
"""Widths and heights of images whose counted tokens are compared with the computed ones."""


class ImageProcessor:
    """The image processor of a model folder.

    Attributes:
        token_id: Id of the tokens whose embeddings an image replaces.
    """

    def __init__(self, processor: Any, token_id: int) -> None:
        """Wrap a processor.

        Args:
            processor: A processor of transformers that has a tokenizer and an image processor.
            token_id: See the attribute. A processor may name another one, which stands for an image in a text.
        """
        self._processor = processor
        self._replacements: dict[tuple[int, int], tuple[str, int]] = {}
        self.token_id = token_id

    @classmethod
    @converts_arguments
    def load(cls, folder: Path) -> "ImageProcessor":
        """Load the processor of a model folder, without torchvision and videos.

        Raises:
            SettingsError: The folder has no image processor that transformers can load.
            MissingExtraError: transformers is not installed.
        """
        try:
            from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
            from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
        except ImportError as error:
            raise MissingExtraError(
                "images need transformers and Pillow. Install rl-core[images] as the README says."
            ) from error
        options: dict[str, Any] = {"local_files_only": True}
        try:
            config: Any = AutoConfig.from_pretrained(folder, **options, trust_remote_code=False)
            kind: Any = PROCESSOR_MAPPING[type(config)]
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options, trust_remote_code=False)
            pixels: Any = AutoImageProcessor.from_pretrained(folder, **options, trust_remote_code=False)
            parts = {"image_processor": pixels, "tokenizer": tokenizer}
            others = {name: None for name in kind.get_attributes() if name not in parts}
            own = _own_arguments(kind, folder, options)
            processor = _without_others(kind)(**parts, **others, **own, chat_template=tokenizer.chat_template)
            token_id = image_token_id(config)
            if token_id is None:
                raise SettingsError("config.json has no image_token_id")
            return cls(processor, token_id)
        except Exception as error:  # a damaged folder raises many types
            raise SettingsError(
                f"{folder}: transformers cannot load the processor of its images ({type(error).__name__}: {error})."
            ) from error

    def expanded(self, text: str, images: Sequence[bytes]) -> str:
        """Return a rendered text in which each image's placeholder has become as many as the image needs.

        Args:
            text: A text with one placeholder for each image, as the chat template writes them.
            images: The encoded images, in the order of the text.

        Raises:
            DataError: The text has another number of placeholders, or an image cannot be decoded, or the model's
                processor refuses it.
        """
        placeholder: str = self._processor.image_token
        if text.count(placeholder) != len(images):
            raise DataError(
                f"a prompt with {len(images)} images must have as many placeholders {placeholder!r} in its text; found "
                f"{text.count(placeholder)}."
            )
        replacements = [self._replacement(image_size(data))[0] for data in images]
        (found,), _ = self._processor.get_text_with_replacements([text], images_replacements=replacements)
        return str(found)

    def spans(self, ids: IntArray, digests: Sequence[str], images: Sequence[bytes]) -> tuple[ImageSpan, ...]:
        """Return where each image lies in a prompt's tokens.

        Args:
            ids: [T] tokens of a text that `expanded` returned.
            digests: Each image's digest.
            images: The encoded images.

        Raises:
            DataError: The tokens have another number of placeholders than the images need.
        """
        counts = [self.num_tokens(data) for data in images]
        (places,) = np.nonzero(ids == self.token_id)
        if len(places) != sum(counts):
            raise DataError(
                f"images must have {sum(counts)} placeholders in the prompt's tokens; found {len(places)}. A text must "
                f"not contain {self._processor.image_token!r} itself."
            )
        parts = np.split(places, np.cumsum(counts)[:-1]) if counts else []
        return tuple(
            ImageSpan(digest=digest, start=int(part[0]), length=int(part[-1]) + 1 - int(part[0]))
            for digest, part in zip(digests, parts, strict=True)
        )

    def num_tokens(self, data: bytes) -> int:
        """Return the number of tokens whose embeddings the image replaces.

        Raises:
            DataError: The image cannot be decoded, or the model's processor refuses it.
        """
        return self._replacement(image_size(data))[1]

    def tokens(self, data: bytes) -> IntArray:
        """Return the tokens that stand for the image in a text, from its first placeholder to its last."""
        ids = self._tokens(self._replacement(image_size(data))[0])
        (places,) = np.nonzero(ids == self.token_id)
        return ids[places[0] : places[-1] + 1]

    def pixels(self, data: bytes) -> Pixels:
        """Return the model's inputs for one image.

        Raises:
            DataError: The image cannot be decoded, the model's processor refuses it, or its inputs need another text
                than `expanded` writes.
        """
        image = open_image(data)
        with _named_refusal(image.size):
            found = self._processor.image_processor(images=[image], return_tensors="np")
            unused = set(self._processor.unused_input_names)
            pixels = {name: np.asarray(value) for name, value in found.items() if name not in unused}
            text = self._processor.replace_image_token(found, image_idx=0)
        if text != self._replacement(image.size)[0]:
            raise DataError(
                f"the model's processor gives an image of {image.width} x {image.height} pixels other placeholders "
                "than it counts for this size. Use another version of transformers."
            )
        return pixels

    def _replacement(self, size: tuple[int, int]) -> tuple[str, int]:
        """Return the text in the place of an image of a width and height, and its number of placeholders."""
        with _named_refusal(size):
            if self._is_counted:
                return self._counted(size)
            if size not in self._replacements:
                self._replacements[size] = self._computed(size)
            return self._replacements[size]

    @cached_property
    def _is_counted(self) -> bool:
        """True if the processor counts tokens without an image, and its text only repeats the placeholder."""
        try:
            return all(self._counted(size) == self._computed(size) for size in PROBES)
        except Exception:  # one without a count, or that refuses a probe: images are computed
            return False

    def _counted(self, size: tuple[int, int]) -> tuple[str, int]:
        (count,) = self._processor._get_num_multimodal_tokens([size[::-1]]).num_image_tokens
        return self._processor.image_token * int(count), int(count)

    def _computed(self, size: tuple[int, int]) -> tuple[str, int]:
        found = self._processor.image_processor(images=[blank_image(size)], return_tensors="np")
        text = str(self._processor.replace_image_token(found, image_idx=0))
        return text, int((self._tokens(text) == self.token_id).sum())

    def _tokens(self, text: str) -> IntArray:
        return np.asarray(self._processor.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)


def image_token_id(config: Any) -> int | None:
    """Return the id of the tokens whose embeddings an image replaces, from transformers' configuration of a model."""
    found = getattr(config, "image_token_id", None)
    found = getattr(config, "image_token_index", None) if found is None else found
    return None if found is None else int(found)


@contextmanager
def _named_refusal(size: tuple[int, int]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # processors raise many types
        width, height = size
        raise DataError(
            f"the model's processor refuses an image of {width} x {height} pixels ({type(error).__name__}: {error}). "
            "Change its size."
        ) from error


def _own_arguments(kind: Any, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a processor's class that are not its parts, as processor_config.json has them."""
    names = inspect.signature(kind.__init__).parameters.keys() - {*kind.get_attributes(), "self", "chat_template"}
    content, _ = kind.get_processor_dict(folder, **options)
    return {name: value for name, value in content.items() if name in names}


@lru_cache
def _without_others(kind: type) -> Any:
    """Return the processor's class without checks of the parts that a policy of images does not need."""

    class Processor(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, part: Any) -> Any:
            return None if part is None else super().check_argument_for_proper_class(name, part)

    return Processor


def joined_pixels(parts: Sequence[Pixels]) -> dict[str, NDArray[Any]]:
    """Join the inputs of several images, in their order."""
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def pixel_digest(pixels: Pixels) -> str:
    """Return the SHA-256 of a model's inputs for images: names, shapes, dtypes and bytes."""
    found = sha256()
    for name, array in sorted(pixels.items()):
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
