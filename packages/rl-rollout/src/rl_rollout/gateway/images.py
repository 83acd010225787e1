"""Images in agents' requests: each is decoded once, kept by its digest, and replaced by the digest."""

import base64
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, NamedTuple

from rl_core.data import Json
from rl_core.errors import DataError
from rl_rollout.gateway.refusals import RefusedError, refused_field
from rl_rollout.gateway.sessions import Session
from rl_rollout.prompts.image_tokens import ImageTokens
from rl_rollout.prompts.row_images import IMAGE_PARTS

MAX_SESSION_BYTES = 1 << 28
"""Maximum size of all distinct images that a session sends in requests."""


class ImagePlace(NamedTuple):
    """The place of an image in a request.

    Attributes:
        field: Name of its part, for messages.
        parts: The list that has the part.
        place: Its index there.
    """

    field: str
    parts: list[Any]
    place: int


class KeptImage(NamedTuple):
    """An image part of a request, once its image is kept. No client can send one, as it is no JSON.

    Attributes:
        digest: Its digest in the store.
    """

    digest: str


def image_places(body: dict[str, Any]) -> list[ImagePlace]:
    """Return the places of images in a request, in any API's form."""
    return [
        place
        for name in ("messages", "input")
        for index, item in enumerate(_listed(body.get(name)))
        if isinstance(item, dict)
        for key in ("content", "output")
        for place in _in_parts(item.get(key), f"{name}[{index}].{key}")
    ]


def keep_images(places: list[ImagePlace], session: Session, images: ImageTokens, *, max_images: int) -> None:
    """Keep images of a request, and put a `KeptImage` in the place of each part.

    Raises:
        RefusedError: There are too many images, or one is not in the request, cannot be decoded, or is refused by the
            model's processor. The error names its field.
    """
    if len(places) > max_images:
        raise RefusedError(
            f"the conversation has {len(places)} images; this server accepts at most {max_images}. Send fewer.",
            param=places[max_images].field,
        )
    for field, parts, index in places:
        parts[index] = _kept(parts[index], field, session, images)


def _kept(part: Json, field: str, session: Session, images: ImageTokens) -> KeptImage:
    field, data = _read(part, field)
    digest = sha256(data).hexdigest()
    if digest not in session.images:
        size = sum(session.images.values()) + len(data)
        if size > MAX_SESSION_BYTES:
            raise RefusedError(
                f"{field}: the session's images have {size} bytes, more than {MAX_SESSION_BYTES}. Send smaller ones.",
                param=field,
            )
        try:
            images.put(data)
        except DataError as error:
            raise RefusedError(f"{field}: {error}", param=field) from error
        session.images[digest] = len(data)
    return KeptImage(digest)


def _listed(value: Json) -> list[Any]:
    return value if isinstance(value, list) else []


def _in_parts(parts: Json, where: str) -> Iterator[ImagePlace]:
    for index, part in enumerate(_listed(parts)):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_result":
            yield from _in_parts(part.get("content"), f"{where}[{index}].content")
        elif kind in IMAGE_PARTS:
            yield ImagePlace(f"{where}[{index}]", parts, index)


def _read(part: Json, field: str) -> tuple[str, bytes]:
    """Return the field of an image's data, and the encoded image.

    Raises:
        RefusedError: The part has no data.
    """
    expected = "a `data:` URL with base64: nothing is fetched"
    match part:
        case {"type": "image", "source": {"type": "base64", "data": found}}:
            field, data = f"{field}.source.data", found if isinstance(found, str) else None
        case {"type": "image"}:
            field, data, found = f"{field}.source", None, part.get("source")
            expected = 'of type "base64" with data: nothing is fetched'
        case {"type": "image_url", "image_url": {"url": found}}:
            field, data = f"{field}.image_url.url", _base64_in(found)
        case _:
            found = part.get("image_url")
            field, data = f"{field}.image_url", _base64_in(found)
    if data is None:
        raise refused_field(field, found, expected)
    try:
        return field, base64.b64decode(data, validate=True)
    except ValueError as error:  # other characters, or a wrong length
        raise RefusedError(f"{field} must be base64 ({error}).", param=field) from error


def _base64_in(url: Json) -> str | None:
    """Return the data in a `data:` URL; None for anything else."""
    head, found, data = url.partition(";base64,") if isinstance(url, str) else ("", "", "")
    return data if found and head.startswith("data:") else None
