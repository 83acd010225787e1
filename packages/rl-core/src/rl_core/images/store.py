"""A folder of images, each kept once under the SHA-256 of its encoded bytes.

Rows, requests and caches carry only the digest. Every process that sees the folder reads the bytes, and checks them, so
an image of a group is stored once, and no image is taken for another.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError, MissingExtraError
from rl_core.files import read_plain, write_atomically
from rl_core.record_fields import converts_arguments

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""Formats of encoded images, by Pillow's names; of an animation, the first picture."""

MAX_IMAGE_BYTES = 1 << 26
"""Maximum size of an encoded image."""

MAX_PIXELS = 1 << 26
"""Maximum width times height, checked before pixels are decoded."""

ORIENTATION = 0x0112
"""EXIF tag of an image's orientation."""

SIDEWAYS = range(5, 9)
"""Orientations whose width is the height that is seen."""


def open_image(data: bytes) -> "Image":
    """Decode an image to RGB, turned as its EXIF orientation says, and on white where it is transparent.

    Raises:
        DataError: It is too large, of another format, damaged, or has values of an unknown range.
        MissingExtraError: Pillow is not installed.
    """
    from PIL import Image, ImageOps

    with _opened(data) as image:
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith(("I", "F")):  # converting would clip to 255
            turned = _in_8_bits(turned, image.format)
        if turned.mode == "RGB" or not turned.has_transparency_data:  # as vLLM decides it
            return turned.convert("RGB")
        turned = turned.convert("RGBA")
        on_white = Image.new("RGB", turned.size, "white")
        on_white.paste(turned, mask=turned.getchannel("A"))
        return on_white


def _in_8_bits(image: "Image", encoding: str | None) -> "Image":
    """Return the high bytes of an image with one channel of 16 bits, as Pillow does for RGB."""
    from PIL import Image

    if encoding != "PNG":
        raise DataError(
            f"an image must have 8 bits a channel, or be a PNG with 16; found Pillow's mode {image.mode!r}, whose "
            "range is unknown. Convert it."
        )
    values = np.asarray(image)
    values = np.where(values == image.info.get("transparency", -1), 0xFFFF, values)
    return Image.fromarray((values >> 8).astype(np.uint8))


def image_size(data: bytes) -> tuple[int, int]:
    """Return the width and height of `open_image`. Only the pixels of a PNG are decoded, as EXIF may follow them.

    Raises:
        DataError: It is too large, of another format, or its first bytes are damaged.
        MissingExtraError: Pillow is not installed.
    """
    with _opened(data) as image:
        size = int(image.width), int(image.height)
        return size[::-1] if image.getexif().get(ORIENTATION) in SIDEWAYS else size


def blank_image(size: tuple[int, int]) -> "Image":
    """Return a black image of a width and height."""
    from PIL import Image

    return Image.new("RGB", size)


@contextmanager
def _opened(data: bytes) -> "Iterator[Image]":
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("images need Pillow. Install rl-core[images] as the README says.") from error
    if len(data) > MAX_IMAGE_BYTES:
        raise DataError(f"an image must have at most {MAX_IMAGE_BYTES} bytes; it has {len(data)}. Make it smaller.")
    encoded = io.BytesIO(data)
    try:
        with warnings.catch_warnings(), Image.open(encoded, formats=FORMATS) as image:
            warnings.simplefilter("ignore")  # of damaged metadata, which does not matter
            if image.width * image.height > MAX_PIXELS:
                raise DataError(
                    f"an image must have at most {MAX_PIXELS} pixels; it has {image.width} x {image.height}. Make it "
                    "smaller."
                )
            yield image
    except DataError:
        raise
    except Exception as error:  # decoders raise many types
        reason = str(error).replace(repr(encoded), "").rstrip()  # its address differs in each process
        raise DataError(
            f"an image cannot be decoded ({type(error).__name__}: {reason}); expected one of {', '.join(FORMATS)}."
        ) from error


def encode_image(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels [height, width, 3] as PNG, without loss.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("images need Pillow. Install rl-core[images] as the README says.") from error
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, format="PNG")
    return encoded.getvalue()


class ImageStore:
    """Images in a folder by digest. Processes may share the folder; equal images are written once."""

    @converts_arguments
    def __init__(self, folder: Path) -> None:
        """Name the folder, which is created with the first image."""
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Keep an encoded image; return its digest, in hexadecimal.

        Raises:
            DataError: It is no image that `open_image` decodes.
        """
        digest = sha256(data).hexdigest()
        path = self._path(digest)
        if not path.is_file() or path.read_bytes() != data:  # new, or torn by a power failure
            open_image(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        return digest

    def get(self, digest: str) -> bytes:
        """Return the bytes of an image.

        Raises:
            DataError: There is no such image, or its file has other bytes.
        """
        if len(digest) != 64 or not digest.isalnum():
            raise DataError(f"an image's digest must be a SHA-256 in hexadecimal; found {digest[:80]!r}.")
        path = self._path(digest)
        data = read_plain(path, max_bytes=MAX_IMAGE_BYTES)
        if sha256(data).hexdigest() != digest:
            raise DataError(f"{path} is not the image that its name says: its bytes have changed. Remove the file.")
        return data

    def _path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest
