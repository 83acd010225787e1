"""A tensor's digest from those of its rectangles: what each rank of a learner computes of its own part adds up.

The checksum is of two sums over the tensor's 32-bit words w[i], row after row, signed and little-endian: w[i] counts
(2 i + 1) times in the first and BASE**i times in the second, modulo 2**64. Every factor is odd, so that each sum
changes with any single word; and what is the same wherever it is computed does not depend on how a tensor was cut.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch.nn.functional import pad

from rl_core.data.records import FloatArray
from rl_core.errors import ShapeError
from rl_core.record_fields import record
from rl_core.weights.update import Rectangle, TensorDigest, probe_vector

BASE = 0x9E3779B97F4A7C15
MODULUS = 2**64
WORD_BYTES = 4
ROW_WORDS = 4096
CHUNK_WORDS = 1 << 22
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


def whole_checksum(tensor: torch.Tensor) -> int:
    """The checksum of a tensor, as `join_digests` has it."""
    return _checksum(unsigned(rectangle_sums(tensor.detach(), (0,) * tensor.ndim, tensor.shape)))


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
    rows, first, stride = _words(values.detach(), offsets, shape)
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    for part in torch.split(rows, max(1, CHUNK_WORDS // max(1, rows.shape[1]))) if rows.numel() else ():
        total += _row_sums(part, first, stride)
        first += len(part) * stride
    return total


def _joined(parts: Sequence[tuple[Rectangle, RectangleDigest]]) -> TensorDigest:
    _, one = parts[0]
    probe = np.zeros(one.shape[:1] or (1,), np.float64)
    for rectangle, digest in parts:
        start = rectangle.offsets[0] if rectangle.offsets else 0
        probe[start : start + len(digest.probe)] += digest.probe
    sums = [sum(digest.sums[number] for _, digest in parts) % MODULUS for number in range(2)]
    return TensorDigest(
        shape=one.shape, dtype=one.dtype, crc32c=_checksum((sums[0], sums[1])), probe=probe.astype(np.float32)
    )


def _checksum(sums: tuple[int, int]) -> int:
    return sums[0] * MODULUS + sums[1]


def _probe(values: torch.Tensor, rectangle: Rectangle, shape: Sequence[int]) -> torch.Tensor:
    if len(shape) < 2:
        return values.detach().float().reshape(-1)
    first, width = rectangle.offsets[1], rectangle.sizes[1]
    vector = probe_vector(shape[1])[first : first + width].to(values.device)
    parts = torch.split(values.detach(), max(1, CHUNK_WORDS // max(1, width)))
    return torch.cat([part.float() @ vector for part in parts])


def _words(values: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> tuple[torch.Tensor, int, int]:
    """A rectangle as [R, K] int32, the tensor's word at which its first row begins, and words from row to row."""
    columns = shape[-1] if len(shape) == 2 else values.numel()
    rows = values.reshape(-1, values.shape[-1] if len(shape) == 2 else values.numel())
    row, column = offsets if len(shape) == 2 else (0, offsets[0] if offsets else 0)
    size = values.element_size()
    if rows.shape[1] == columns:  # one run of bytes, wherever a word begins in it
        start = (row * columns + column) * size
        content = rows.contiguous().reshape(-1).view(torch.uint8)
        front = start % WORD_BYTES
        content = pad(content, (front, -(front + len(content)) % (WORD_BYTES * ROW_WORDS)))
        return content.view(torch.int32).view(-1, ROW_WORDS), start // WORD_BYTES, ROW_WORDS
    if any(number * size % WORD_BYTES for number in (columns, column, rows.shape[1])):
        whole = pad(rows, (column, columns - column - rows.shape[1]))  # zeros add nothing
        return _words(whole, (row, 0), shape)
    words = rows.contiguous().view(torch.int32)
    return words, (row * columns + column) * size // WORD_BYTES, columns * size // WORD_BYTES


def _row_sums(rows: torch.Tensor, first: int, stride: int) -> torch.Tensor:
    """[2] int64 of [R, K] words; row r begins at word first + r * stride of the tensor."""
    places = torch.arange(1, 2 * rows.shape[1], 2, device=rows.device)
    starts = torch.arange(len(rows), device=rows.device) * (2 * stride) + 2 * first
    plain = (rows * places).sum(1) + rows.sum(1) * starts
    powers = (rows * _powers(BASE, rows.shape[1], rows.device)).sum(1)
    steps = _powers(pow(BASE, stride, MODULUS), len(rows), rows.device)
    return torch.stack([plain.sum(), (powers * steps).sum() * _signed(pow(BASE, first, MODULUS))])


@lru_cache(maxsize=32)
def _powers(base: int, count: int, device: torch.device) -> torch.Tensor:
    """[count] int64: base**0, base**1, ..., modulo 2**64."""
    factors = torch.full((count,), _signed(base % MODULUS), dtype=torch.int64, device=device)
    factors[:1] = 1
    return factors.cumprod(0)


def _signed(number: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return number - MODULUS if number >= MODULUS // 2 else number
