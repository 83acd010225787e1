"""Thumbnails of a run's images, as parts of a report."""

import base64
import io

from rl_core.errors import RLError
from rl_core.images import ImageStore, open_image
from rl_metrics.report.packing import BlobSink, pack

SIDE = 96
"""Maximum width and height of a thumbnail, in pixels."""

MAX_THUMBNAILS = 256
"""Maximum number of distinct images shown; texts tell the sizes of the others."""


class Thumbnails:
    """Packs each image once, however many trajectories have it."""

    def __init__(self, store: ImageStore, sink: BlobSink) -> None:
        """Set the run's images, and the destination of the packed parts."""
        self._store, self._sink = store, sink
        self._parts: dict[str, str] = {}

    def part(self, digest: str) -> str:
        """Return the name of an image's part; empty if the image is not there, or beyond `MAX_THUMBNAILS`."""
        if digest not in self._parts and len(self._parts) < MAX_THUMBNAILS:
            self._parts[digest] = self._packed(digest)
        return self._parts.get(digest, "")

    def _packed(self, digest: str) -> str:
        try:
            image = open_image(self._store.get(digest))
        except (RLError, OSError):  # removed with the run's other images, or Pillow is not installed
            return ""
        image.thumbnail((SIDE, SIDE))
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=85)
        url = "data:image/jpeg;base64," + base64.b64encode(encoded.getvalue()).decode()
        return self._sink(pack({"url": url}, {}))
