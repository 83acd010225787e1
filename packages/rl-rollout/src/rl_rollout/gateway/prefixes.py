"""Finds the longest of many stored token sequences with which a prompt begins."""

from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

from rl_core.data import IntArray

ValueT = TypeVar("ValueT")
DIGEST_BYTES = 16


class Prefixes(Generic[ValueT]):
    """Values by token sequence. A search reads the prompt once, however many sequences are stored."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_length: dict[int, dict[bytes, ValueT]] = {}

    def add(self, token_ids: IntArray, value: ValueT) -> None:
        """Store a value; it replaces that of an equal sequence."""
        digest = blake2b(_bytes_of(token_ids), digest_size=DIGEST_BYTES).digest()
        self._by_length.setdefault(len(token_ids), {})[digest] = value

    def longest(self, prompt_ids: IntArray) -> tuple[ValueT | None, int]:
        """Return the value of the longest sequence with which a prompt begins, and its length; else (None, 0)."""
        read = blake2b(digest_size=DIGEST_BYTES)
        found: tuple[ValueT | None, int] = (None, 0)
        start = 0
        for length in sorted(length for length in self._by_length if length <= len(prompt_ids)):
            read.update(_bytes_of(prompt_ids[start:length]))
            start = length
            if (value := self._by_length[length].get(read.digest())) is not None:
                found = value, length
        return found


def _bytes_of(token_ids: IntArray) -> bytes:
    return np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
