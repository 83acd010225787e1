"""Drawing tokens from logits, one seed a row."""

from collections.abc import Sequence

import numpy as np
import torch

from rl_rollout.engines.protocol import SamplingParams


def processed_logprobs(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Logprobs of the distribution that each row is drawn from: temperature, then top_k, then top_p.

    Args:
        logits: [N, V].
        sampling: One a row; temperature 0 leaves the row as it is.

    Returns:
        [N, V] float32; -inf where a token cannot be drawn.
    """
    temperatures = torch.tensor([params.temperature or 1.0 for params in sampling], device=logits.device)
    scaled = logits.float() / temperatures.unsqueeze(-1)
    if any(params.top_k is not None or params.top_p < 1 for params in sampling):
        scaled = torch.stack([_filtered(row, params) for row, params in zip(scaled, sampling, strict=True)])
    return scaled.log_softmax(-1)


def draw_tokens(
    logprobs: torch.Tensor, sampling: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """One token a row: the likeliest at temperature 0, else a draw that seed and position decide.

    Args:
        logprobs: [N, V] float32 of `processed_logprobs`.
        sampling: One a row.
        seeds: One a row.
        positions: Index of the token in its response, one a row.

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
    # a mark beyond the last token that can be drawn is a rounding of that token's upper edge
    last = logprobs.shape[-1] - 1 - torch.isfinite(logprobs).flip(-1).int().argmax(-1)
    is_greedy = torch.tensor([params.temperature == 0 for params in sampling], device=logprobs.device)
    return torch.where(is_greedy, greedy, torch.minimum(drawn, last))


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of a counter-based generator."""
    key = seed % 2**64
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def _filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[V] logits, -inf where top_k or top_p leaves a token out."""
    if params.top_k is not None and params.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        is_out = probabilities.cumsum(-1) - probabilities >= params.top_p
        logits = logits.masked_fill(torch.zeros_like(is_out).scatter(0, order, is_out), -torch.inf)
    return logits
