"""Response lengths by group, drawn from a seed: group n has the same lengths in every simulation."""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rl_rollout.simulation.workload import Lengths

BLOCK = 256
"""Number of groups drawn at once."""


class GroupLengths:
    """Number of tokens of each response, by group number from 0."""

    def __init__(self, lengths: Lengths, *, group_size: int, seed: int) -> None:
        """Store the distribution. Nothing is drawn yet."""
        self._lengths = lengths
        self._group_size = group_size
        self._seed = seed
        self._blocks: dict[int, list[list[int]]] = {}

    def __getitem__(self, group: int) -> list[int]:
        """Return the number of tokens of each response of the group, from 1 to the maximum."""
        block, row = divmod(group, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block).tolist()
        return self._blocks[block][row]

    def num_tokens(self, group: int) -> int:
        """Return the number of trained tokens of a group: its responses with their prompts."""
        return sum(self[group]) + self._group_size * self._lengths.prompt_tokens

    def _draw(self, block: int) -> NDArray[np.int64]:
        """Draw [BLOCK, group_size] lengths."""
        rng = np.random.default_rng([self._seed, block])
        shared = self._lengths.group_correlation
        of_group = rng.standard_normal((BLOCK, 1))
        own = rng.standard_normal((BLOCK, self._group_size))
        scores = math.sqrt(shared) * of_group + math.sqrt(1 - shared) * own
        tokens = np.exp(self._logarithms(scores)) * self._lengths.scale
        return np.clip(np.rint(tokens), 1, self._lengths.maximum).astype(np.int64)

    def _logarithms(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        lengths = self._lengths
        if lengths.median is not None and lengths.sigma is not None:
            return np.asarray(math.log(lengths.median) + lengths.sigma * scores, dtype=np.float64)
        normal = NormalDist()
        shares = np.array([normal.cdf(score) for score in scores.ravel().tolist()]).reshape(scores.shape)
        known, tokens = zip(*lengths.quantiles, strict=True)
        return np.asarray(np.interp(shares, known, np.log(tokens)), dtype=np.float64)
