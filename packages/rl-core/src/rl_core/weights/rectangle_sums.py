"""A tensor's digest from those of its rectangles: what each rank of a learner computes of its own part adds up.

The checksum is `word_sums`, which does not depend on how a tensor was cut.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from rl_core.data.records import FloatArray
from rl_core.errors import ShapeError
from rl_core.record_fields import record
from rl_core.weights.digests import TensorDigest, probe_vector, sums_text
from rl_core.weights.update import Rectangle
from rl_core.weights.word_sums import CHUNK_BYTES, MODULUS, WORD_BYTES, row_sums, word_sums

CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES
"""Most words that are summed up at once."""


@record
class RectangleDigest:
    """What a rank computes of its rectangle of a tensor.

    Attributes:
        shape: Of the whole tensor.
        dtype: torch dtype name without prefix.
        sums: The two sums of its words.
        probe: [n] float32: of its rows, as far as its columns go; of a vector the values themselves.
    """

    shape: tuple[int, ...]
    dtype: str
    sums: tuple[int, int]
    probe: FloatArray


def digest_rectangle(values: torch.Tensor, rectangle: Rectangle, shape: Sequence[int]) -> RectangleDigest:
    """Digest of a rectangle of a vector or matrix.

    Args:
        values: Its elements, contiguous, of `rectangle.sizes`.
        rectangle: Where they are in the tensor.
        shape: Of the tensor.

    Raises:
        ShapeError: The tensor has more than two axes.
    """
    if len(shape) > 2:
        raise ShapeError(f"rectangles are of vectors and matrices; found {rectangle.name!r} of shape {list(shape)}.")
    return RectangleDigest(
        shape=tuple(shape),
        dtype=str(values.dtype).removeprefix("torch."),
        sums=unsigned(rectangle_sums(values, rectangle.offsets, shape)),
        probe=_probe(values, rectangle, shape).cpu().numpy(),
    )


def join_digests(parts: Iterable[tuple[Rectangle, RectangleDigest]]) -> dict[str, TensorDigest]:
    """Digest of each tensor from those of all its rectangles."""
    by_name: dict[str, list[tuple[Rectangle, RectangleDigest]]] = {}
    for rectangle, digest in parts:
        by_name.setdefault(rectangle.name, []).append((rectangle, digest))
    return {name: _joined(of_tensor) for name, of_tensor in by_name.items()}


def unsigned(sums: torch.Tensor) -> tuple[int, int]:
    """The two sums as numbers from 0 on."""
    first, second = sums.tolist()
    return first % MODULUS, second % MODULUS


def rectangle_sums(values: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The share of a rectangle in the two sums of its tensor.

    Args:
        values: Its elements.
        offsets: Where it begins.
        shape: Of the tensor, of at most two axes.

    Returns:
        [2] int64, on the rectangle's device.
    """
    size = values.element_size()
    columns = shape[1] if len(shape) == 2 else values.numel()
    row, column = offsets if len(shape) == 2 else (0, offsets[0] if offsets else 0)
    if len(shape) < 2 or values.shape[1] == columns:
        return word_sums(values, start_bytes=(row * columns + column) * size)
    if any(number * size % WORD_BYTES for number in (columns, column, values.shape[1])):
        whole = pad(values.detach(), (column, columns - column - values.shape[1]))  # zeros add nothing
        return word_sums(whole, start_bytes=row * columns * size)
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    first, stride = (row * columns + column) * size // WORD_BYTES, columns * size // WORD_BYTES
    for part in torch.split(values.detach(), max(1, CHUNK_WORDS // max(1, values.shape[1]))):
        total += row_sums(part.contiguous().view(torch.int32), first, stride)
        first += len(part) * stride
    return total


def _joined(parts: Sequence[tuple[Rectangle, RectangleDigest]]) -> TensorDigest:
    _, one = parts[0]
    probe = np.zeros(one.shape[:1] or (1,), np.float64)
    for rectangle, digest in parts:
        start = rectangle.offsets[0] if rectangle.offsets else 0
        probe[start : start + len(digest.probe)] += digest.probe
    sums = [sum(digest.sums[number] for _, digest in parts) % MODULUS for number in range(2)]
    checksum = sums_text((sums[0], sums[1]))
    return TensorDigest(shape=one.shape, dtype=one.dtype, checksum=checksum, probe=probe.astype(np.float32))


def _probe(values: torch.Tensor, rectangle: Rectangle, shape: Sequence[int]) -> torch.Tensor:
    if len(shape) < 2:
        return values.detach().float().reshape(-1)
    first, width = rectangle.offsets[1], rectangle.sizes[1]
    vector = probe_vector(shape[1])[first : first + width].to(values.device)
    parts = torch.split(values.detach(), max(1, CHUNK_WORDS // max(1, width)))
    return torch.cat([part.float() @ vector for part in parts])
