"""Destinations of a report's packed parts: the page itself, or a server's folder."""

import base64
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

BlobSink = Callable[[bytes], str]
"""Keeps a packed part; gives its name, which is the same for the same content."""


def page_blobs(page: BinaryIO) -> BlobSink:
    """Writes each part into the page that is being written, once, as a script that no browser runs.

    Args:
        page: Open for writing, within its body.
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
    """Writes each part as a file of a folder, unless it is there.

    Args:
        folder: It exists.
        names: Takes the names of the parts.
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
    """Such as "b3f0c9…": a digest, so that a page knows what it has already."""
    return "b" + blake2b(content, digest_size=10).hexdigest()
