"""Images of requests: read from a store by digest, compared with the tokens, and turned into pixel values once."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import ImageSpan, IntArray
from rl_core.errors import DataError, EngineError
from rl_core.images import ImageProcessor, ImageStore, joined_pixels, pixel_digest

MAX_IMAGES = 64
"""Maximum number of images in a sequence."""

MAX_HELD_BYTES = 1 << 29
"""Maximum size of the pixel values that an engine keeps for later requests."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedImage:
    """An image among a sequence's tokens.

    Attributes:
        span: Where it lies.
        is_embedded: [span.length] bool, True for the tokens whose embeddings it replaces.
        pixels: The model's inputs for it, by name.
    """

    span: ImageSpan
    is_embedded: NDArray[np.bool_]
    pixels: Mapping[str, NDArray[Any]]


class EngineImages:
    """Images of a store, as pixel values of a model. Those of recent requests are kept, by digest.

    Attributes:
        token_id: Id of the tokens whose embeddings an image replaces.
    """

    def __init__(self, processor: ImageProcessor, store: ImageStore) -> None:
        """Start with nothing kept."""
        self._processor, self._store = processor, store
        self.token_id = processor.token_id
        self._held: OrderedDict[str, tuple[int, Mapping[str, NDArray[Any]]]] = OrderedDict()
        self._digests: dict[tuple[str, ...], str] = {}
        self._num_bytes = 0

    @classmethod
    def open(cls, model_dir: Path, image_folder: Path | None) -> "EngineImages | None":
        """Return the images of a store for a model; None without a store.

        Raises:
            SettingsError: The model has no image processor.
        """
        return None if image_folder is None else cls(ImageProcessor.load(model_dir), ImageStore(Path(image_folder)))

    def placed(self, token_ids: IntArray, spans: Sequence[ImageSpan]) -> tuple[tuple[PlacedImage, ...], str]:
        """Return the images of a sequence with their pixel values, and the digest of these.

        Args:
            token_ids: [T] the sequence.
            spans: Where its images lie, in their order. Tokens elsewhere stand for no image, even those that a model
                has sampled.

        Raises:
            EngineError: A span is not among the tokens, has another number of placeholders than its image needs, or
                its image is missing, changed or damaged.
        """
        images = []
        end = 0
        for span in spans:
            if span.start < end or span.length < 1 or span.start + span.length > len(token_ids):
                raise EngineError(
                    f"images must lie among the sequence's {len(token_ids)} tokens, one after the other; found one of "
                    f"{span.length} tokens at {span.start}, after {end}."
                )
            end = span.start + span.length
            num_tokens, pixels = self._read(span.digest)
            is_embedded = token_ids[span.start : end] == self._processor.token_id
            if int(is_embedded.sum()) != num_tokens:
                raise EngineError(
                    f"image {span.digest} needs {num_tokens} tokens of id {self._processor.token_id}; found "
                    f"{int(is_embedded.sum())} in tokens {span.start} to {end - 1}. Tokenize the prompt with "
                    "rl_core.images.ImageProcessor of this model's folder."
                )
            images.append(PlacedImage(span=span, is_embedded=is_embedded, pixels=pixels))
        return tuple(images), self._digest(images)

    def _read(self, digest: str) -> tuple[int, Mapping[str, NDArray[Any]]]:
        """Return an image's number of tokens, and its pixel values."""
        found = self._held.get(digest)
        if found is not None:
            self._held.move_to_end(digest)
            return found
        try:
            data = self._store.get(digest)
            found = self._processor.num_tokens(data), self._processor.pixels(data)
        except (DataError, OSError) as error:
            raise EngineError(f"image {digest[:80]} cannot be used: {error}") from error
        self._held[digest] = found
        self._num_bytes += _size(found[1])
        while self._num_bytes > MAX_HELD_BYTES and len(self._held) > 1:
            _, (_, pixels) = self._held.popitem(last=False)
            self._num_bytes -= _size(pixels)
        return found

    def _digest(self, images: Sequence[PlacedImage]) -> str:
        """Return the digest of the images' joined pixel values; empty without images. The last ones are kept."""
        if not images:
            return ""
        key = tuple(image.span.digest for image in images)
        if key not in self._digests:
            if len(self._digests) >= 1000:
                self._digests.clear()
            self._digests[key] = pixel_digest(joined_pixels([image.pixels for image in images]))
        return self._digests[key]


def _size(pixels: Mapping[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in pixels.values())
