"""A tensor's digest from the digests of its rectangles, each computed by one rank of a learner.

The checksum is `word_sums`, which does not depend on how the tensor was divided.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from rl_core.data.records import FloatArray
from rl_core.record_fields import record
from rl_core.weights.digests import TensorDigest, probe_vector_on, sums_text, to_host
from rl_core.weights.update import Rectangle
from rl_core.weights.word_sums import CHUNK_BYTES, MODULUS, WORD_BYTES, row_sums, word_sums

CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES
"""Maximum number of words summed at once."""


@record
class RectangleDigest:
    """A rank's digest of its rectangle of a tensor.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: torch dtype name without prefix.
        sums: The two sums of its words.
        probe: [n] float32 probe of its rows over its last axis; the values themselves for a vector.
    """

    shape: tuple[int, ...]
    dtype: str
    sums: tuple[int, int]
    probe: FloatArray


def digest_rectangles(parts: Iterable[tuple[Rectangle, Sequence[int], torch.Tensor]]) -> list[RectangleDigest]:
    """Digest each rectangle; results of one device are copied to the host together.

    Args:
        parts: Position, shape of the tensor, and elements of shape `Rectangle.sizes`.
    """
    shapes, dtypes, sums, probes = [], [], [], []
    for rectangle, shape, values in parts:
        shapes.append(tuple(shape))
        dtypes.append(str(values.dtype).removeprefix("torch."))
        sums.append(rectangle_sums(values, rectangle.offsets, shape))
        probes.append(_probe(values, rectangle, shape))
    numbers = to_host([*sums, *probes])
    return [
        RectangleDigest(shape=shape, dtype=dtype, sums=_unsigned(of_sums), probe=probe.numpy())
        for shape, dtype, of_sums, probe in zip(shapes, dtypes, numbers[: len(sums)], numbers[len(sums) :], strict=True)
    ]


def join_digests(parts: Iterable[tuple[Rectangle, RectangleDigest]]) -> dict[str, TensorDigest]:
    """Combine the digests of all rectangles into the digest of each tensor."""
    by_name: dict[str, list[tuple[Rectangle, RectangleDigest]]] = {}
    for rectangle, digest in parts:
        by_name.setdefault(rectangle.name, []).append((rectangle, digest))
    return {name: _joined(of_tensor) for name, of_tensor in by_name.items()}


def _unsigned(sums: torch.Tensor) -> tuple[int, int]:
    """Return the two sums as non-negative numbers."""
    first, second = sums.tolist()
    return first % MODULUS, second % MODULUS


def rectangle_sums(values: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return a rectangle's contribution to the two sums of its tensor.

    Args:
        values: Its elements.
        offsets: Its first index per axis.
        shape: Shape of the tensor.

    Returns:
        [2] int64, on the rectangle's device.
    """
    if len(shape) > 2:
        return _sums_of_axes(values, offsets, shape)
    size = values.element_size()
    columns = shape[1] if len(shape) == 2 else values.numel()
    row, column = offsets if len(shape) == 2 else (0, offsets[0] if offsets else 0)
    if len(shape) < 2 or values.shape[1] == columns:
        return word_sums(values, start_bytes=(row * columns + column) * size)
    if any(number * size % WORD_BYTES for number in (columns, column, values.shape[1])):
        whole = pad(values.detach(), (column, columns - column - values.shape[1]))  # zeros do not change the sums
        return word_sums(whole, start_bytes=row * columns * size)
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    first, stride = (row * columns + column) * size // WORD_BYTES, columns * size // WORD_BYTES
    for part in torch.split(values.detach(), max(1, CHUNK_WORDS // max(1, values.shape[1]))):
        total += row_sums(part.contiguous().view(torch.int32), first, stride)
        first += len(part) * stride
    return total


def _sums_of_axes(values: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return `rectangle_sums` of more than two axes: two become one where the rectangle allows, or it is divided."""
    if values.shape[-1] == shape[-1]:
        merged = (*offsets[:-2], offsets[-2] * shape[-1]), (*shape[:-2], shape[-2] * shape[-1])
        return rectangle_sums(values.flatten(-2), *merged)
    rows, shape = (shape[0], shape[1]), (shape[0] * shape[1], *shape[2:])
    if values.shape[1] == rows[1]:
        return rectangle_sums(values.flatten(0, 1), (offsets[0] * rows[1], *offsets[2:]), shape)
    starts = (index * rows[1] + offsets[1] for index in range(offsets[0], offsets[0] + len(values)))
    parts = [rectangle_sums(part, (start, *offsets[2:]), shape) for part, start in zip(values, starts, strict=True)]
    return torch.stack(parts).sum(0)


def _joined(parts: Sequence[tuple[Rectangle, RectangleDigest]]) -> TensorDigest:
    _, one = parts[0]
    probe = np.zeros(one.shape[: max(1, len(one.shape) - 1)], np.float64)
    for rectangle, digest in parts:
        pairs = zip(rectangle.offsets, rectangle.sizes, strict=True)
        place = tuple(slice(start, start + size) for start, size in pairs)[: probe.ndim]
        probe[place] += digest.probe.reshape(rectangle.sizes[: probe.ndim])
    sums = [sum(digest.sums[number] for _, digest in parts) % MODULUS for number in range(2)]
    checksum = sums_text((sums[0], sums[1]))
    return TensorDigest(shape=one.shape, dtype=one.dtype, checksum=checksum, probe=probe.astype(np.float32).flatten())


def _probe(values: torch.Tensor, rectangle: Rectangle, shape: Sequence[int]) -> torch.Tensor:
    if len(shape) < 2:
        return values.detach().float().reshape(-1)
    first, width = rectangle.offsets[-1], rectangle.sizes[-1]
    vector = probe_vector_on(shape[-1], values.device)[first : first + width]
    parts = torch.split(values.detach().flatten(0, -2), max(1, CHUNK_WORDS // max(1, width)))
    return torch.cat([part.float() @ vector for part in parts])
