"""Samples tokens from logits, with one seed per row."""

from collections.abc import Sequence

import numpy as np
import torch

from rl_rollout.engines.protocol import SamplingParams


def processed_logprobs(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the logprobs of each row's sampling distribution: temperature, then top_k, then top_p.

    Args:
        logits: [N, V].
        sampling: One per row. Temperature 0 leaves the row unchanged.

    Returns:
        [N, V] float32; -inf for tokens that cannot be sampled.
    """
    temperatures = torch.tensor([params.temperature or 1.0 for params in sampling], device=logits.device)
    scaled = logits.float() / temperatures.unsqueeze(-1)
    if any(params.top_k is not None or params.top_p < 1 for params in sampling):
        scaled = torch.stack([_filtered(row, params) for row, params in zip(scaled, sampling, strict=True)])
    return scaled.log_softmax(-1)


def draw_tokens(
    logprobs: torch.Tensor, sampling: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Sample one token per row: the most likely at temperature 0, else determined by seed and position.

    Args:
        logprobs: [N, V] float32 of `processed_logprobs`.
        sampling: One per row.
        seeds: One per row.
        positions: Index of the token in its response, one per row.

    Returns:
        [N] int64.
    """
    greedy = logprobs.argmax(-1)
    if all(params.temperature == 0 for params in sampling):
        return greedy
    uniforms = [_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    cumulative = logprobs.double().exp().cumsum(-1)
    marks = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device).unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, marks, right=True).squeeze(-1)
    # A mark beyond the last token that can be drawn is due to rounding.
    last = logprobs.shape[-1] - 1 - torch.isfinite(logprobs).flip(-1).int().argmax(-1)
    is_greedy = torch.tensor([params.temperature == 0 for params in sampling], device=logprobs.device)
    return torch.where(is_greedy, greedy, torch.minimum(drawn, last))


def _uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) from a counter-based generator."""
    key = seed % 2**64
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def _filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return [V] logits, with -inf for tokens that top_k or top_p excludes."""
    if params.top_k is not None and params.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        is_out = probabilities.cumsum(-1) - probabilities >= params.top_p
        logits = logits.masked_fill(torch.zeros_like(is_out).scatter(0, order, is_out), -torch.inf)
    return logits
