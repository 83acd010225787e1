"""Images that rows name by URL: fetched only from places that the user allows, and kept in the user's cache."""

import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from hashlib import sha256
from http.client import HTTPException
from typing import Any

from rl_core.errors import DataError, SettingsError
from rl_core.files import cache_folder, preview, write_atomically
from rl_core.images import MAX_IMAGE_BYTES

SILENCE_S = 30
DEADLINE_S = 120
"""A server may be silent for the first, and an image must have arrived after the second."""


def check_places(places: Sequence[str]) -> None:
    """Check beginnings of URLs.

    Raises:
        SettingsError: One does not end with a slash, so that it could match another host, or has another protocol.
    """
    for place in places:
        if not place.startswith(("https://", "http://")) or place.count("/") < 3 or not place.endswith("/"):
            raise SettingsError(
                f"prompts.image_urls must have beginnings of URLs, such as 'https://a.example/'; found {place!r}."
            )


class _AllowedRedirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, places: Sequence[str]) -> None:
        self._places = tuple(places)

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith(self._places):
            raise urllib.error.URLError(f"it redirects to {preview(newurl)}, which prompts.image_urls does not allow")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch_image(url: str, places: Sequence[str]) -> bytes:
    """Return the bytes of a URL. They are kept in the user's cache, so that a resumed run has the same.

    Args:
        url: A URL.
        places: Beginnings of URLs that may be fetched.

    Raises:
        DataError: The URL is not allowed, or cannot be fetched.
    """
    if not url.startswith(tuple(places)):
        raise DataError(
            f"{preview(url)} is a URL, which is not fetched. Download the image and name its file, or allow its "
            "beginning in prompts.image_urls."
        )
    folder = cache_folder("rl-rollout/images")
    kept = None if folder is None else folder / sha256(url.encode()).hexdigest()
    if kept is not None and kept.is_file():
        return kept.read_bytes()
    opener = urllib.request.build_opener(_AllowedRedirects(places))
    data, end = b"", time.monotonic() + DEADLINE_S
    try:
        with opener.open(url, timeout=SILENCE_S) as response:
            while (part := response.read1(1 << 20)) and len(data) <= MAX_IMAGE_BYTES:
                data += part
                if time.monotonic() > end:
                    raise TimeoutError(f"it took longer than {DEADLINE_S} s")
            if response.length:
                raise EOFError(f"{response.length} bytes are missing")
    except (OSError, EOFError, HTTPException, ValueError) as error:
        raise DataError(f"{preview(url)} cannot be fetched: {error}.") from error
    if kept is not None and len(data) <= MAX_IMAGE_BYTES:
        write_atomically(kept, data)
    return data
