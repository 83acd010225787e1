"""Routes a request to the engine with the longest cached prefix, unless others have much less load."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np

from rl_core.data import IntArray

BLOCK_TOKENS = 16
"""Tokens per block. Prefixes are compared in blocks, as engines cache them."""
MAX_BLOCKS = 1 << 17
"""Maximum number of remembered blocks over all engines. The least recently used are dropped."""


class Router:
    """Distributes requests over engines by load and by prefix. Use it on one event loop.

    Load is the number of samples in progress. A request goes to the engine with the longest cached prefix of its
    prompt, provided that its load is at most `max_ratio` times the lowest, plus `slack` samples.
    """

    def __init__(self, num_engines: int, *, max_ratio: float = 1.25, slack: int = 8) -> None:
        """Start with no load and no known prefixes."""
        self.loads = [0] * num_engines
        self._max_ratio = max_ratio
        self._slack = slack
        self._owners: OrderedDict[bytes, int] = OrderedDict()

    def add(self) -> int:
        """Add an engine and return its index."""
        self.loads.append(0)
        return len(self.loads) - 1

    def choose(self, input_ids: IntArray, *, among: Collection[int]) -> int:
        """Choose the engine for a prompt.

        Args:
            input_ids: [P] int32.
            among: Engines that serve; at least one.
        """
        blocks = list(_block_digests(input_ids))
        least = min(self.loads[index] for index in among)
        fitting = [index for index in among if self.loads[index] <= least * self._max_ratio + self._slack]
        depths = dict.fromkeys(fitting, 0)
        for depth, block in enumerate(blocks, start=1):
            owner = self._owners.get(block)
            if owner in depths:
                depths[owner] = depth
        chosen = min(fitting, key=lambda index: (-depths[index], self.loads[index], index))
        for block in blocks:
            self._owners[block] = chosen
            self._owners.move_to_end(block)
        while len(self._owners) > MAX_BLOCKS:
            self._owners.popitem(last=False)
        return chosen

    @contextmanager
    def carrying(self, index: int, num_samples: int) -> Iterator[None]:
        """Count samples as in progress on an engine."""
        self.loads[index] += num_samples
        try:
            yield
        finally:
            self.loads[index] -= num_samples

    def forget(self, index: int) -> None:
        """Forget an engine's cached prefixes."""
        for block in [block for block, owner in self._owners.items() if owner == index]:
            del self._owners[block]


def _block_digests(input_ids: IntArray) -> Iterator[bytes]:
    """Return a digest for each prefix of complete blocks, shortest first."""
    digest = blake2b(digest_size=12)
    content = np.ascontiguousarray(input_ids, dtype=np.int32)
    for start in range(0, len(content) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(content[start : start + BLOCK_TOKENS].tobytes())
        yield digest.digest()
