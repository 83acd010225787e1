"""The images of a rank's rows, as the inputs of transformers' class: pixel values, token types and positions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.data import Batch, ImageSpan, IntArray
from rl_core.errors import SettingsError
from rl_core.images import ImageProcessor, ImageStore, encode_image
from rl_distill.packing import Pack
from rl_distill.row_images import check_num_placeholders

Positions = Callable[..., tuple[Tensor, Tensor]]
"""transformers' function of positions with several axes, `get_rope_index`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackImages:
    """The images of a pack's C computed tokens.

    Attributes:
        starts: Index of each image's first computed token, ascending.
        digests: Digest of each image.
        pixels: The class's inputs for an image, such as pixel_values and image_grid_thw, by digest.
        token_types: [1, C] int64: 1 at placeholders, else 0.
        positions: [axes, 1, C] int64 positions; None if those of a text's tokens are meant.
    """

    starts: tuple[int, ...]
    digests: tuple[str, ...]
    pixels: Mapping[str, Mapping[str, Tensor]]
    token_types: Tensor
    positions: Tensor | None

    def joined(self, chosen: Sequence[int]) -> dict[str, Tensor]:
        """Return the class's inputs for some of the images, by their index and in this order."""
        return joined_inputs([self.pixels[self.digests[index]] for index in chosen])


def joined_inputs(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the inputs of images along their first axis.

    Raises:
        SettingsError: Inputs of images of different sizes do not fit together.
    """
    for name in parts[0] if parts else ():
        if len(shapes := {tuple(part[name].shape[1:]) for part in parts}) > 1:
            raise SettingsError(
                f"a policy's {name} of several images must have one shape besides the first axis; found "
                f"{sorted(shapes)}. A processor that cuts images into different numbers of parts is not supported."
            )
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


class RankImages:
    """The images of a rank's rows. Each distinct one of a share is read and processed once.

    Attributes:
        processor: The policy's processor.
    """

    def __init__(self, processor: ImageProcessor, store: ImageStore | None, *, dtype: torch.dtype) -> None:
        """Keep no image yet.

        Args:
            processor: The policy's processor.
            store: Images of the rows; None refuses rows with images.
            dtype: Dtype of pixel values.
        """
        self.processor, self._store, self._dtype = processor, store, dtype
        self._inputs: dict[str, Mapping[str, Tensor]] = {}
        self._num_tokens: dict[str, int] = {}

    def hold(self, batch: Batch) -> None:
        """Process the images of a share, and forget all others.

        Raises:
            SettingsError: There is no store.
            DataError: An image is missing, or its bytes have changed.
            ShapeError: A row has another number of placeholders than its image needs.
        """
        wanted = {span.digest for spans in batch.images for span in spans}
        store = self._store
        if store is None:
            if not wanted:
                return
            raise SettingsError("rows have images; set image_folder to the folder of their ImageStore.")
        for digest in sorted(self._inputs.keys() - wanted):
            del self._inputs[digest]
        for digest in sorted(wanted - self._inputs.keys()):
            self.add(digest, store.get(digest))
        check_num_placeholders(batch, self.processor.token_id, self._num_tokens)

    def add(self, digest: str, data: bytes) -> None:
        """Process an image."""
        found = {name: torch.from_numpy(np.array(array)) for name, array in self.processor.pixels(data).items()}
        self._inputs[digest] = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in found.items()}
        self._num_tokens[digest] = self.processor.num_tokens(data)

    def inputs(self, spans: Sequence[ImageSpan]) -> dict[str, Tensor]:
        """Return the class's inputs for the images of a row."""
        return joined_inputs([self._inputs[span.digest] for span in spans])

    def token_types(self, ids: Tensor) -> Tensor:
        """Return 1 at placeholders, else 0."""
        return (ids == self.processor.token_id).long()

    def of_pack(self, pack: Pack, positions_of: Positions | None) -> PackImages | None:
        """Return the images of a pack; None if it has none.

        Args:
            pack: The pack, in host memory.
            positions_of: The class's function of positions; None if it has only those of a text.
        """
        if not any(pack.images):
            return None
        forest, ids = pack.forest, pack.micro_batch.input_ids
        firsts = [
            (int(forest.places[start + span.start]), span.digest)
            for start, spans in zip(pack.offsets[:-1], pack.images, strict=True)
            for span in spans
        ]
        found = sorted(set(firsts))
        places = torch.from_numpy(forest.places)
        positions = None
        if positions_of is not None:
            bounds = zip(pack.offsets[:-1], pack.offsets[1:], pack.images, strict=True)
            rows = [self._positions(ids[start:stop], spans, positions_of) for start, stop, spans in bounds]
            axes = max(len(row) for row in rows)
            of_rows = torch.cat([row.expand(axes, -1) for row in rows], 1)
            positions = of_rows.new_empty(axes, 1, forest.num_computed)
            positions[:, 0, places] = of_rows
        token_types = ids.new_empty(1, forest.num_computed)
        token_types[0, places] = self.token_types(ids)
        return PackImages(
            starts=tuple(start for start, _ in found),
            digests=tuple(digest for _, digest in found),
            pixels={digest: self._inputs[digest] for _, digest in found},
            token_types=token_types,
            positions=positions,
        )

    def _positions(self, ids: Tensor, spans: Sequence[ImageSpan], positions_of: Positions) -> Tensor:
        """Return [axes, T] positions of a row."""
        if not spans:
            return torch.arange(len(ids))[None]
        inputs: dict[str, Any] = {n: x for n, x in self.inputs(spans).items() if not x.is_floating_point()}
        found, _ = positions_of(ids[None], mm_token_type_ids=self.token_types(ids)[None], **inputs)
        return found[:, 0]

    def probe(self) -> list[tuple[IntArray, str]]:
        """Return tokens and digest of three images: two of one size, and so with the same tokens, and a wider one."""
        random, found = np.random.default_rng(0), []
        for width in (_PROBE_SIZE, _PROBE_SIZE, 2 * _PROBE_SIZE):
            data = encode_image(random.integers(0, 256, (_PROBE_SIZE, width, 3), dtype=np.uint8))
            digest = sha256(data).hexdigest()
            self.add(digest, data)
            found.append((self.processor.tokens(data), digest))
        return found


_PROBE_SIZE = 64
"""Height of probe images in pixels."""


def load_images(policy_dir: Path | None, image_folder: Path | None, *, dtype: torch.dtype) -> RankImages | None:
    """Return the images of a policy; None if its folder has no processor, so that its rows are texts.

    Raises:
        SettingsError: There is a folder of images, and no processor that transformers can load.
    """
    store = None if image_folder is None else ImageStore(image_folder)
    try:
        if policy_dir is None:
            raise SettingsError("a policy that starts from config.json has no processor of images.")
        return RankImages(ImageProcessor.load(policy_dir), store, dtype=dtype)
    except SettingsError:
        if store is not None:
            raise
        return None
