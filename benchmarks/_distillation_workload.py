"""Inputs of both sides of benchmarks/distillation.py: sizes, and random numbers from a seed."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Sizes of a step.

    Attributes:
        num_tokens: Trained tokens.
        vocab_size: Number of rows of the output matrix.
        hidden_size: Number of its columns.
        top_k: Number of the teacher's tokens per position.
        dtype: Dtype of hidden states and matrix.
    """

    num_tokens: int
    vocab_size: int = 151_936
    hidden_size: int = 896
    top_k: int = 64
    dtype: str = "float32"

    def as_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


PRESETS = {
    "cpu": Preset(num_tokens=2_048),
    "gpu": Preset(num_tokens=8_192, dtype="bfloat16"),
    "tiny": Preset(num_tokens=96, vocab_size=4_000, hidden_size=32),
}
"""Presets; all but tiny have the head of Qwen2.5-0.5B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Inputs of a step.

    Attributes:
        hidden: [T, H] hidden states of the student.
        ids: [T, k] int64, the teacher's most likely tokens, unique in each row.
        logprobs: [T, k] float32, their logprobs in descending order; their probabilities sum to about 0.9.
        weights: [T] float32, weights of the tokens in the loss.
    """

    hidden: Tensor
    ids: Tensor
    logprobs: Tensor
    weights: Tensor


def make_matrix(preset: Preset, device: torch.device) -> Tensor:
    """Return the [V, H] output matrix; the same on both sides."""
    generator = torch.Generator().manual_seed(0)
    matrix: Tensor = torch.randn(preset.vocab_size, preset.hidden_size, generator=generator)
    scaled: Tensor = matrix.mul_(float(preset.hidden_size) ** -0.5).to(device, getattr(torch, preset.dtype))
    return scaled


def make_step(preset: Preset, *, seed: int, device: torch.device) -> Step:
    """Return the inputs of a seed's step; the same on both sides."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    shape = (preset.num_tokens, preset.top_k)
    hidden = torch.randn(preset.num_tokens, preset.hidden_size, generator=generator)
    stride = preset.vocab_size // preset.top_k
    ids = torch.randint(stride, shape, generator=generator) + stride * torch.arange(preset.top_k)
    scores = (2.0 * torch.randn(shape, generator=generator)).sort(-1, descending=True).values
    logprobs = torch.log_softmax(scores, -1) + torch.tensor(0.9).log()
    weights = torch.rand(preset.num_tokens, generator=generator) / preset.num_tokens
    return Step(
        hidden=hidden.to(device, getattr(torch, preset.dtype)),
        ids=ids.to(device),
        logprobs=logprobs.to(device),
        weights=weights.to(device),
    )
