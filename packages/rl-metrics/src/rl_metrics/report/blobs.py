"""Destinations of a report's packed parts: the page itself, or a server's folder."""

import base64
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

BlobSink = Callable[[bytes], str]
"""Stores a packed part and returns its name, which is equal for equal contents."""


def page_blobs(page: BinaryIO) -> BlobSink:
    """Return a sink that writes each part once into a page, as a script element that browsers do not run.

    Args:
        page: Page open for writing, within its body.
    """
    written: set[str] = set()

    def put(content: bytes) -> str:
        name = blob_name(content)
        if name not in written:
            written.add(name)
            page.write(b'<script type="text/plain" id="' + name.encode() + b'">')
            page.write(base64.b64encode(content) + b"</script>\n")
        return name

    return put


def folder_blobs(folder: Path, names: set[str]) -> BlobSink:
    """Return a sink that writes each part to a file, unless it exists.

    Args:
        folder: Existing folder of the files.
        names: Set that receives the names of the parts.
    """

    def put(content: bytes) -> str:
        name = blob_name(content)
        names.add(name)
        file = folder / name
        if not file.exists():
            part = file.with_suffix(".part")
            part.write_bytes(content)
            part.replace(file)
        return name

    return put


def blob_name(content: bytes) -> str:
    """Return a part's name such as "b3f0c9…", a digest by which a page recognizes parts that it has."""
    return "b" + blake2b(content, digest_size=10).hexdigest()
