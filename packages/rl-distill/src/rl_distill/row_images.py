"""Images among the tokens of rows: their checks, and which tokens belong to the same image."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Batch, RowKey
from rl_core.errors import ShapeError


def check_images(batch: Batch, token_id: int | None) -> None:
    """Check that the placeholders of rows and their images agree.

    How many placeholders an image needs is checked where it is processed, by `check_num_placeholders`.

    Args:
        batch: Needs `input_ids`.
        token_id: Id of a placeholder; None for a policy without images.

    Raises:
        ShapeError: A policy without images gets one, an image lies outside of its row or another's place, or a
            placeholder belongs to no image. The message names the row.
        DataError: A row's extras have something else as "images".
    """
    ids = batch.ragged("input_ids")
    for row, spans in enumerate(batch.images):
        if token_id is None:
            if spans:
                raise ShapeError(f"{_name(batch.keys[row])} has an image; this policy has no vision tower.")
            continue
        tokens, end = ids[row], 0
        covered = np.zeros(len(tokens), dtype=np.bool_)
        for span in spans:
            stop = span.start + span.length
            if not (end <= span.start < stop <= len(tokens) and token_id == tokens[span.start] == tokens[stop - 1]):
                raise ShapeError(
                    f"an image must begin and end with a placeholder (token {token_id}), after the image before it; "
                    f"{_name(batch.keys[row])} with {len(tokens)} tokens has one at [{span.start}, {stop})."
                )
            covered[span.start : stop] = True
            end = stop
        if (lost := np.flatnonzero((tokens == token_id) & ~covered)).size:
            raise ShapeError(
                f"each placeholder of an image (token {token_id}) must lie in one of the row's images; "
                f"{_name(batch.keys[row])} has {lost.size} others, first at token {lost[0]}. A response must not "
                "contain the token: exclude it when sampling."
            )


def check_num_placeholders(batch: Batch, token_id: int, needed: dict[str, int]) -> None:
    """Check that each image has as many placeholders as it needs.

    Args:
        batch: Rows that `check_images` accepts.
        token_id: Id of a placeholder.
        needed: Placeholders of each image by digest.

    Raises:
        ShapeError: The message names the row and the image.
    """
    ids = batch.ragged("input_ids")
    for row, spans in enumerate(batch.images):
        for span in spans:
            found = int((ids[row][span.start : span.start + span.length] == token_id).sum())
            if found != needed[span.digest]:
                raise ShapeError(
                    f"image {span.digest} needs {needed[span.digest]} placeholders (token {token_id}) in this policy; "
                    f"{_name(batch.keys[row])} has {found} at token {span.start}. Check that rows were made with the "
                    "policy's own processor."
                )


def image_numbers(batch: Batch) -> NDArray[np.int64] | None:
    """Return [T] numbers, equal where tokens belong to the same image and 0 outside of images; None without images."""
    images = batch.images
    if not any(images):
        return None
    ids = batch.ragged("input_ids")
    numbers, known = np.zeros(len(ids.values), dtype=np.int64), Counter[str]()
    for row, spans in enumerate(images):
        for span in spans:
            start = int(ids.offsets[row]) + span.start
            numbers[start : start + span.length] = known.setdefault(span.digest, len(known) + 1)
    return numbers


def _name(key: RowKey) -> str:
    return f"row {tuple(key)}"
