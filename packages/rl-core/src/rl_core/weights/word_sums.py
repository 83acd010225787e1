"""A checksum for tensors on a GPU: two sums over a tensor's 32-bit words, computed where the tensor is.

The bytes of a tensor, row after row, are read as signed little-endian words w[0], w[1], ..., the last one filled with
zeros. The sums, modulo 2**64, are

    first  = sum of (2 i + 1) w[i]
    second = sum of BASE**i w[i]

Every factor is odd, so that each sum changes with any single word. Factors of two places differ by less than a power
of two at which a difference of words could vanish, so that each also changes when two different words change places.
Integers wrap alike on every device, in whatever order they are added. Both sums are linear: those of the rectangles of
a tensor, each at its place, add up to those of the whole.

They find faults, and keep nobody out: who can change the weights can also change them so that the sums stay.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BASE = 0x9E3779B97F4A7C15
"""Odd, 5 modulo 8: its powers have the longest period."""

WORD_BYTES = 4
ROW_WORDS = 4096
CHUNK_ROWS = 1024
CHUNK_BYTES = CHUNK_ROWS * ROW_WORDS * WORD_BYTES
"""What is summed up at once: a product of this many words takes twice as much memory."""


def word_sums(tensor: "torch.Tensor") -> "torch.Tensor":
    """The two sums of a tensor's contiguous bytes.

    Args:
        tensor: Of any shape, strides and dtype.

    Returns:
        [2] int64, on the tensor's device; nothing waits for it.
    """
    import torch

    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    first = 0
    for words in _word_chunks(tensor.detach()):
        total += _chunk_sums(words, first)
        first += len(words)
    return total


def _chunk_sums(words: "torch.Tensor", first: int) -> "torch.Tensor":
    """[2] int64 of words that begin at word `first` of the tensor."""
    import torch
    from torch.nn.functional import pad

    rows = pad(words, (0, -len(words) % ROW_WORDS)).view(-1, ROW_WORDS)  # zeros add nothing
    places, powers, row_powers = _factors(words.device)
    plain = rows.sum(1)
    inner = (rows * places).sum(1)
    row_places = torch.arange(len(rows), device=words.device) * (2 * ROW_WORDS) + 2 * first
    scaled = (rows * powers).sum(1) * row_powers[: len(rows)]
    return torch.stack([(inner + plain * row_places).sum(), scaled.sum() * _signed(pow(BASE, first, 2**64))])


@lru_cache(maxsize=32)
def _factors(device: "torch.device") -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """The factors of a row's words in either sum, and what the second one multiplies each row with; int64."""
    import torch

    places = torch.arange(1, 2 * ROW_WORDS, 2, device=device)
    powers = [_signed(pow(BASE, place, 2**64)) for place in range(ROW_WORDS)]
    row_powers = [_signed(pow(BASE, row * ROW_WORDS, 2**64)) for row in range(CHUNK_ROWS)]
    return places, torch.tensor(powers, device=device), torch.tensor(row_powers, device=device)


def _signed(number: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return number - 2**64 if number >= 2**63 else number


def _word_chunks(tensor: "torch.Tensor") -> Iterator["torch.Tensor"]:
    """[n] int32 each: the words of a tensor in order; only the last chunk may be filled up."""
    import torch
    from torch.nn.functional import pad

    for part in _flat_parts(tensor):
        for chunk in torch.split(part, CHUNK_BYTES // part.element_size()):
            if not chunk.is_contiguous() or chunk.storage_offset() * chunk.element_size() % WORD_BYTES:
                chunk = chunk.clone(memory_format=torch.contiguous_format)  # a view as words begins at one
            if chunk.nbytes % WORD_BYTES:
                chunk = pad(chunk.view(torch.uint8), (0, -chunk.nbytes % WORD_BYTES))
            if chunk.numel():
                yield chunk.view(torch.int32)


def _flat_parts(tensor: "torch.Tensor") -> Iterator["torch.Tensor"]:
    """[n] views of a tensor's elements in order, or copies of at most a chunk; all but the last are whole words.

    Copies are larger where four rows are, and their length is odd.
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
