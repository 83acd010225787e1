"""Lengths of responses by group, drawn from a seed: group n has the same ones in every simulation."""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rl_rollout.simulation.workload import Lengths

BLOCK = 256
"""Groups drawn at once."""


class GroupLengths:
    """Tokens of each response, by the number of its group from 0 on."""

    def __init__(self, lengths: Lengths, *, group_size: int, seed: int) -> None:
        """Nothing is drawn yet."""
        self._lengths = lengths
        self._group_size = group_size
        self._seed = seed
        self._blocks: dict[int, list[list[int]]] = {}

    def __getitem__(self, group: int) -> list[int]:
        """Tokens of each response of the group, at least 1 and at most the maximum."""
        block, row = divmod(group, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block).tolist()
        return self._blocks[block][row]

    def num_tokens(self, group: int) -> int:
        """Of all its responses and their prompts, which is what trains."""
        return sum(self[group]) + self._group_size * self._lengths.prompt_tokens

    def _draw(self, block: int) -> NDArray[np.int64]:
        """[BLOCK, group_size]."""
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
