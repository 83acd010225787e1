"""Images of rows: kept once by content, and turned into the tokens and pixel values of a model."""

from rl_core.images.pixels import ImageProcessor, image_token_id, joined_pixels, pixel_digest
from rl_core.images.store import MAX_IMAGE_BYTES, ImageStore, encode_image, open_image

__all__ = [
    "MAX_IMAGE_BYTES",
    "ImageProcessor",
    "ImageStore",
    "encode_image",
    "image_token_id",
    "joined_pixels",
    "open_image",
    "pixel_digest",
]
