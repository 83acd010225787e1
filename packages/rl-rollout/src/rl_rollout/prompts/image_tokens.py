"""Images of messages as tokens, for loops that render messages during a run."""

from collections.abc import Iterable, Mapping, Sequence

from rl_core.data import ImageSpan, IntArray, Json
from rl_core.images import ImageProcessor, ImageStore


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


def message_text(message: Mapping[str, Json]) -> str:
    """Return a message's text, without its images."""
    content = message.get("content", "")
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part["text"]) for part in content if part.get("type") == "text")
