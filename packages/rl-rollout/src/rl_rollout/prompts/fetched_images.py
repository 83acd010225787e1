"""Images that rows name by URL: fetched only from places that the user allows, and kept in the user's cache."""

import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rl_core.errors import DataError, SettingsError
from rl_core.files import cache_folder, preview, write_atomically
from rl_core.images import MAX_IMAGE_BYTES
from rl_rollout.prompts.within import call_within

SILENCE_S = 30
DEADLINE_S = 120
"""A server may be silent for the first, and an image must have arrived after the second."""


def check_places(places: Sequence[str]) -> None:
    """Check beginnings of URLs.

    Raises:
        SettingsError: One does not end with a slash, so that it could match another host, or has another protocol.
    """
    for place in places:
        parts = urlsplit(place)
        if parts.scheme not in ("https", "http") or not (parts.hostname or "").strip() or not place.endswith("/"):
            raise SettingsError(
                f"prompts.image_urls must have beginnings of URLs, such as 'https://a.example/'; found {place!r}."
            )


class _AllowedRedirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, places: Sequence[str]) -> None:
        self._places = tuple(places)

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not _is_allowed(newurl, self._places):
            raise urllib.error.URLError(f"it redirects to {preview(newurl)}, which prompts.image_urls does not allow")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch_image(url: str, places: Sequence[str]) -> tuple[bytes, Path | None]:
    """Return the bytes of a URL, and the file in the user's cache that keeps them, so that a resumed run has the same.

    Args:
        url: A URL.
        places: Beginnings of URLs that may be fetched.

    Raises:
        DataError: The URL is not allowed, or cannot be fetched.
    """
    if not _is_allowed(url, places):
        raise DataError(
            f"{preview(url)} is a URL, which is not fetched. Download the image and name its file, or allow its "
            "beginning in prompts.image_urls."
        )
    folder = cache_folder("rl-rollout/images")
    kept = None if folder is None else folder / sha256(url.encode()).hexdigest()
    if kept is not None and kept.is_file():
        return kept.read_bytes(), kept
    data = call_within(
        DEADLINE_S, partial(_received, url, places), what=preview(url), error=DataError, fails="cannot be fetched"
    )
    if kept is not None:
        write_atomically(kept, data)
    return data, kept


def _is_allowed(url: str, places: Sequence[str]) -> bool:
    """Return whether a URL begins with an allowed place, and does not lead out of it again."""
    return url.startswith(tuple(places)) and ".." not in unquote(urlsplit(url).path).split("/")


def _received(url: str, places: Sequence[str]) -> bytes:
    """Return the body of a URL, or a byte more than an image may have.

    Raises:
        OSError: The server cannot be reached, refuses, or ends too early.
    """
    opener = urllib.request.build_opener(_AllowedRedirects(places))
    with opener.open(url, timeout=SILENCE_S) as response:
        data: bytes = response.read(MAX_IMAGE_BYTES + 1)
        if response.length and len(data) <= MAX_IMAGE_BYTES:
            raise EOFError(f"{response.length} bytes are missing")
    return data
