"""Images of messages as tokens, for loops that render messages during a run."""

import base64
from collections.abc import Iterable, Mapping, Sequence

from rl_core.data import ImageSpan, IntArray, Json
from rl_core.images import ImageProcessor, ImageStore

FIRST_BYTES = {"png": b"\x89PNG", "jpeg": b"\xff\xd8", "gif": b"GIF8", "bmp": b"BM"}
"""First bytes of encoded images, by the name of their media type."""


class ImageTokens:
    """The tokens of images that a run keeps.

    Attributes:
        processor: The model's image processor.
        store: The run's images.
    """

    def __init__(self, processor: ImageProcessor, store: ImageStore) -> None:
        """Join a model's processor and a run's images."""
        self.processor = processor
        self.store = store

    def put(self, data: bytes) -> str:
        """Keep an encoded image that the model can take; return its digest.

        Raises:
            DataError: It cannot be decoded, or the model's processor refuses it.
        """
        self.processor.num_tokens(data)
        return self.store.put(data)

    def expanded(self, text: str, digests: Sequence[str]) -> str:
        """Return a rendered text with as many placeholders for each image as it needs.

        Raises:
            DataError: The text has another number of placeholders, or an image is missing.
        """
        return self.processor.expanded(text, list(map(self.store.get, digests)))

    def spans(self, ids: IntArray, digests: Sequence[str]) -> tuple[ImageSpan, ...]:
        """Return where each image lies in the tokens of a text that `expanded` returned.

        Raises:
            DataError: The tokens have another number of placeholders, or an image is missing.
        """
        return self.processor.spans(ids, digests, list(map(self.store.get, digests)))


def image_digests(messages: Iterable[Mapping[str, Json]]) -> list[str]:
    """Return the digests of the messages' images, in their order."""
    parts = (part for one in messages if isinstance(one.get("content"), list) for part in one["content"])
    return [part["digest"] for part in parts if part.get("type") == "image" and "digest" in part]


def with_data_urls(messages: Iterable[Mapping[str, Json]], store: ImageStore) -> list[dict[str, Json]]:
    """Return messages with each image in the form in which OpenAI's clients send it.

    Raises:
        DataError: An image is missing.
    """

    def part_of(part: Json) -> Json:
        if part.get("type") != "image" or "digest" not in part:
            return part
        data = store.get(part["digest"])
        kind = next((kind for kind, first in FIRST_BYTES.items() if data.startswith(first)), "webp")
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"},
        }

    return [
        {**one, "content": list(map(part_of, one["content"]))} if isinstance(one.get("content"), list) else {**one}
        for one in messages
    ]


def message_text(message: Mapping[str, Json]) -> str:
    """Return a message's text, without its images."""
    content = message.get("content", "")
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part["text"]) for part in content if part.get("type") == "text")
