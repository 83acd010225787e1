"""Samples of the skip-cache benchmark: 1,024 ragged samples of 256 to 4,096 tokens, 21 bytes per token.

Columns are those of the transfer benchmark, with the structure of rollouts: 8 samples of a prompt share its tokens,
which have no logprobs and do not train. Every process creates them from the seed. Needs only numpy.
"""

import numpy as np
from _payload import COLUMNS, LONGEST, SHORTEST, Rows, make_rows
from numpy.typing import NDArray

__all__ = ["COLUMNS", "GROUP_SIZE", "LONGEST", "NUM_GROUPS", "PROMPT_TOKENS", "Rows", "make_samples"]

SEED = 61_260
NUM_GROUPS = 128
GROUP_SIZE = 8
PROMPT_TOKENS = 64


def make_samples(num_groups: int = NUM_GROUPS) -> Rows:
    """Return the samples of a number of prompts, the same in every process.

    Logprobs use all bits of their mantissas, like real ones; tokens are uniform over 150,000.
    """
    random = np.random.default_rng(SEED)
    lengths = random.integers(SHORTEST, LONGEST + 1, num_groups * GROUP_SIZE, dtype=np.int64)
    rows = make_rows(lengths, seed=SEED)
    is_prompt = rows.columns["position_ids"] < PROMPT_TOKENS
    prompts = random.integers(0, 150_000, (num_groups, PROMPT_TOKENS), dtype=np.int64)
    input_ids = rows.columns["input_ids"].copy()
    input_ids[is_prompt] = np.repeat(prompts, GROUP_SIZE, axis=0).reshape(-1)
    logprobs = -random.exponential(size=len(input_ids)).astype(np.float32)
    logprobs[is_prompt] = 0.0
    columns = {**rows.columns, "input_ids": input_ids, "logprobs": logprobs, "mask": (~is_prompt).astype(np.int8)}
    return Rows(lengths=lengths, columns=columns)


def positions(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [sum of lengths] positions from 0 in each sample, which can be derived from the lengths."""
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) - starts
