"""A checksum for tensors on a GPU: two sums over a tensor's 32-bit words, computed on the tensor's device.

The bytes of a tensor, row after row, are read as signed little-endian words w[0], w[1], ..., the last one padded with
zeros. The sums, modulo 2**64, are

    first  = sum of (2 i + 1) w[i]
    second = sum of BASE**i w[i]

Every factor is odd, so each sum changes with any single word. In tensors of fewer than 2**31 words, no two factors are
equal modulo 2**33, so each sum also changes if two different words are swapped. Integers wrap in the same way on every
device, in any order of addition. Both sums are linear: the sums of a tensor's rectangles, each at its position, add up
to those of the whole (`rectangle_sums`).

The sums detect faults, not attacks: anyone who can change the weights can preserve the sums.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BASE = 0x9E3779B97F4A7C15
"""Odd, and 5 modulo 8, so that its powers have the longest period."""

MODULUS = 2**64
WORD_BYTES = 4
ROW_WORDS = 4096
CHUNK_BYTES = 1024 * ROW_WORDS * WORD_BYTES
"""Number of words summed at once; the product uses twice the memory of the words."""


def word_sums(tensor: "torch.Tensor", *, start_bytes: int = 0) -> "torch.Tensor":
    """Return the contribution of a range of bytes to a tensor's two sums; by default the sums of the whole tensor.

    Args:
        tensor: Tensor of any shape, strides and dtype; its contiguous bytes are the range.
        start_bytes: Start of the range in the summed tensor.

    Returns:
        [2] int64, on the tensor's device, computed asynchronously.
    """
    import torch
    from torch.nn.functional import pad

    front = start_bytes % WORD_BYTES
    if front:  # a vector that starts inside a word
        tensor = pad(tensor.detach().reshape(-1), (front // tensor.element_size(), 0))
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    first = start_bytes // WORD_BYTES
    for words in _word_chunks(tensor.detach()):
        rows = pad(words, (0, -len(words) % ROW_WORDS)).view(-1, ROW_WORDS)  # zeros do not change the sums
        total += row_sums(rows, first, ROW_WORDS)
        first += len(words)
    return total


def row_sums(rows: "torch.Tensor", first: int, stride: int) -> "torch.Tensor":
    """Return the contribution of rows of words to their tensor's two sums.

    Args:
        rows: [R, K] int32.
        first: Index in the tensor of the first word of row 0.
        stride: Words between the starts of consecutive rows.

    Returns:
        [2] int64, on the rows' device.
    """
    import torch

    places = torch.arange(1, 2 * rows.shape[1], 2, device=rows.device)
    starts = torch.arange(len(rows), device=rows.device) * (2 * stride) + 2 * first
    plain = (rows * places).sum(1) + rows.sum(1) * starts
    powers = (rows * _powers(BASE, rows.shape[1], rows.device)).sum(1)
    steps = _powers(pow(BASE, stride, MODULUS), len(rows), rows.device)
    return torch.stack([plain.sum(), (powers * steps).sum() * _signed(pow(BASE, first, MODULUS))])


@lru_cache(maxsize=128)
def _powers(base: int, count: int, device: "torch.device") -> "torch.Tensor":
    """Return [count] int64: base**0, base**1, ..., modulo 2**64."""
    import torch

    factors = torch.full((count,), _signed(base % MODULUS), dtype=torch.int64, device=device)
    factors[:1] = 1
    return factors.cumprod(0)


def _signed(number: int) -> int:
    """Convert to a torch int64 with the same 64 bits."""
    return number - MODULUS if number >= MODULUS // 2 else number


def _word_chunks(tensor: "torch.Tensor") -> Iterator["torch.Tensor"]:
    """Yield [n] int32 chunks with the words of a tensor in order; only the last chunk may be padded."""
    import torch
    from torch.nn.functional import pad

    for part in _flat_parts(tensor):
        for chunk in torch.split(part, CHUNK_BYTES // part.element_size()):
            if not chunk.is_contiguous() or chunk.storage_offset() * chunk.element_size() % WORD_BYTES:
                chunk = chunk.clone(memory_format=torch.contiguous_format)  # a view as words must start at a word
            if chunk.nbytes % WORD_BYTES:
                chunk = pad(chunk.view(torch.uint8), (0, -chunk.nbytes % WORD_BYTES))
            if chunk.numel():
                yield chunk.view(torch.int32)


def _flat_parts(tensor: "torch.Tensor") -> Iterator["torch.Tensor"]:
    """Yield [n] views of a tensor's elements in order, or copies of at most a chunk; only the last may end mid-word.

    A copy is larger if four rows are larger than a chunk and their length is odd.
    """
    import torch

    per_word = max(1, WORD_BYTES // tensor.element_size())
    if tensor.is_contiguous() or tensor.nbytes <= CHUNK_BYTES:
        yield tensor.reshape(-1)
        return
    row = tensor[0].numel()
    num_rows = CHUNK_BYTES // (row * tensor.element_size()) // per_word * per_word
    if not num_rows and row % per_word == 0:
        for part in tensor:
            yield from _flat_parts(part)
        return
    for part in torch.split(tensor, num_rows or per_word):
        yield part.reshape(-1)
