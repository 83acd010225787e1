"""Texts of token sequences with images, for people."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from rl_core.data import ImageSpan, IntArray
from rl_core.errors import DataError
from rl_core.images import ImageStore, open_image
from rl_rollout.prompts import PromptTokenizer

SequenceWithImages = tuple[IntArray | Sequence[int], Sequence[ImageSpan]]
"""Token ids, and the images among them."""


def decode_shown(
    tokenizer: PromptTokenizer, sequences: Sequence[SequenceWithImages], *, skip_special_tokens: bool
) -> list[str]:
    """Decode sequences, with a text such as "[image 84x56]" in place of each image's tokens."""
    pieces: list[IntArray | Sequence[int]] = []
    for ids, spans in sequences:
        starts = [0, *(span.start + span.length for span in spans)]
        stops = [*(span.start for span in spans), len(ids)]
        pieces += (ids[start:stop] for start, stop in zip(starts, stops, strict=True))
    label = image_labels(tokenizer)
    texts = iter(tokenizer.decode(pieces, skip_special_tokens=skip_special_tokens))  # in one call, which is faster
    return [next(texts) + "".join(label(span.digest) + next(texts) for span in spans) for _, spans in sequences]


def prompt_and_response(
    ids: IntArray | Sequence[int], images: Sequence[ImageSpan], num_prompt_tokens: int
) -> tuple[SequenceWithImages, SequenceWithImages]:
    """Divide a trajectory with its images after the prompt's tokens."""
    own = [span for span in images if span.start < num_prompt_tokens]
    later = [replace(span, start=span.start - num_prompt_tokens) for span in images[len(own) :]]
    return (ids[:num_prompt_tokens], own), (ids[num_prompt_tokens:], later)


def image_labels(tokenizer: PromptTokenizer) -> Callable[[str], str]:
    """Return a function that describes an image by its digest, such as "[image 84x56]"."""

    @cache
    def label(digest: str) -> str:
        if tokenizer.images is None:
            return "[image]"
        return _label(tokenizer.images.store, digest)

    return label


def _label(store: ImageStore, digest: str) -> str:
    try:
        width, height = open_image(store.get(digest)).size
    except (DataError, OSError):  # the text is worth more than its error
        return "[image]"
    return f"[image {width}x{height}]"
