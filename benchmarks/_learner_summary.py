"""Arithmetic of the learner benchmark: speeds, agreement of the sides, model FLOPs. Pure functions on plain numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median
from typing import Any

OURS, PEER, UNSHARED = "ours", "transformers", "ours_unshared"
OURS_CLASS = "ours_class"
"""Our learner with transformers' class in place of its own layers (`policy.backend = "transformers"`)."""
CONTROL = "transformers_mkl"
"""transformers with MKL's code path for Intel processors; reported without a target."""

TARGETS = {
    (OURS, PEER): {"equal": 1.35, "ragged": 2.3, "shared_256_8": 2.0, "shared_512_16": 4.0, "trees": 2.0},
    (OURS, UNSHARED): {"shared_256_8": 1.5, "shared_512_16": 2.1, "trees": 1.5},
    (OURS_CLASS, PEER): {"ragged": 1.4},
    (OURS_CLASS, OURS): {"equal": 0.85, "ragged": 0.85},
}
"""Minimum ratio of the first side's tokens/s to the second's, by workload."""

SHARE_OF_BOUND = {"trees": 0.8}
"""Minimum share of the bound of sharing; if the bound is known, it replaces the ratio."""

_PEAK_BF16_FLOPS: dict[str, float | None] = {
    "B200": 2250e12,
    "H200 NVL": None,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "L4": 121e12,
}
"""Dense peak FLOP/s by a part of the device's name, from NVIDIA's data sheets; the first match counts."""


class DisagreementError(RuntimeError):
    """The sides computed different results, so their speeds must not be compared."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Measurements of one side on one workload; the first step in every list is a warm-up.

    Attributes:
        step_s: Seconds of each step.
        losses: Loss of each step.
        grad_norms: Gradient norm of each step, before clipping.
        num_tokens: Tokens of a batch without padding; the same in every step.
        num_computed_tokens: Tokens of each step with padding.
        bound: Maximum speed-up of a step by sharing; None if not measured.
        about: The side's description of itself at its end.
    """

    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_computed_tokens: list[int] = field(default_factory=list)
    bound: float | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def add(self, answer: Mapping[str, Any]) -> None:
        """Add the result of a step."""
        self.step_s.append(answer["step_s"])
        self.losses.append(answer["loss"])
        self.grad_norms.append(answer["grad_norm"])
        self.num_tokens = answer["num_tokens"]
        self.num_computed_tokens.append(answer["num_computed_tokens"])

    @property
    def tokens_per_s(self) -> float:
        """Speed of the median step after the warm-up."""
        return self.num_tokens / median(self.step_s[1:])


def largest_difference(ours: Measured, peer: Measured) -> dict[str, float]:
    """Return the largest relative difference of losses and gradient norms over all steps; inf if one is not finite."""
    pairs = {"loss": (ours.losses, peer.losses), "grad_norm": (ours.grad_norms, peer.grad_norms)}
    return {name: max(_difference(*pair) for pair in zip(*both, strict=True)) for name, both in pairs.items()}


def _difference(own: float, theirs: float) -> float:
    return abs(own - theirs) / abs(theirs) if isfinite(own) and isfinite(theirs) and theirs else inf


def check_agreement(ours: Measured, peer: Measured, *, tolerance: float) -> dict[str, float]:
    """Raise an error if the sides computed different results.

    Args:
        ours: Our side.
        peer: The other side.
        tolerance: Maximum relative difference.

    Returns:
        Result of `largest_difference`.

    Raises:
        DisagreementError: A loss or gradient norm differs by more, or is not finite.
    """
    found = largest_difference(ours, peer)
    for name, difference in found.items():
        if difference > tolerance:
            raise DisagreementError(
                f"{name} must agree to {tolerance:g} in every step; the largest relative difference is {difference:g}. "
                f"ours: {getattr(ours, _LISTS[name])}; the other: {getattr(peer, _LISTS[name])}."
            )
    return found


_LISTS = {"loss": "losses", "grad_norm": "grad_norms"}


def result_row(system: str, workload: str, found: Measured, *, flops: float) -> dict[str, Any]:
    """Return a row of `results`.

    Args:
        system: Name of the side.
        workload: A name in `TARGETS`.
        found: Its measurements.
        flops: FLOPs of the model for a batch, forward and backward, without padding.
    """
    about = found.about
    seconds = median(found.step_s[1:])
    peak = peak_bf16_flops(about["device"])
    return {
        "system": system,
        "workload": workload,
        "tokens_per_s": round(found.tokens_per_s, 1),
        "peak_memory_mb": round(about["peak_bytes"] / 1e6, 1),
        "start_memory_mb": round(about["start_bytes"] / 1e6, 1),
        "tokens_per_s_best": round(found.num_tokens / min(found.step_s[1:]), 1),
        "step_s": [round(value, 4) for value in found.step_s[1:]],
        "fill": round(found.num_tokens * len(found.num_computed_tokens) / sum(found.num_computed_tokens), 4),
        "model_flops_per_s": round(flops / seconds),
        "mfu": None if peak is None else round(flops / seconds / peak, 4),
        "device": about["device"],
        "threads": about["threads"],
        "versions": about["versions"],
        "losses": found.losses,
        "grad_norms": found.grad_norms,
    }


def comparison(workload: str, ours: Measured, theirs: Measured, *, system: str = OURS, peer: str) -> dict[str, Any]:
    """Compare the sides: ratios of their median steps, of the steps of each round, and of their memory."""
    ratio = ours.tokens_per_s / theirs.tokens_per_s
    pairs = [other / own for own, other in zip(ours.step_s[1:], theirs.step_s[1:], strict=True)]
    wanted = TARGETS.get((system, peer), {}).get(workload)
    if theirs.bound is not None:
        wanted = SHARE_OF_BOUND[workload] * theirs.bound if workload in SHARE_OF_BOUND else wanted
    taken = [about["peak_bytes"] - about["start_bytes"] for about in (ours.about, theirs.about)]
    return {
        "workload": workload,
        "system": system,
        "peer": peer,
        "memory_ratio": round(taken[0] / max(taken[1], 1), 3),
        "ratio": round(ratio, 3),
        "ratio_of_rounds": [round(pair, 3) for pair in pairs],
        "bound": None if theirs.bound is None else round(theirs.bound, 3),
        "share_of_bound": None if theirs.bound is None else round(ratio / theirs.bound, 3),
        "wanted": None if wanted is None else round(wanted, 3),
        "is_met": None if wanted is None else ratio >= wanted,
    }


def model_flops(*, num_parameters: int, lengths: Sequence[int], attention_size: int) -> float:
    """Return the FLOPs of a batch, forward and backward, without recomputation and padding.

    Args:
        num_parameters: Number of parameters; a tied embedding counts once, as the head.
        lengths: Tokens of each row.
        attention_size: Layers times heads times their dimension; with causal attention, a token sees half of its row.
    """
    attention = 6.0 * attention_size * sum(float(length) ** 2 for length in lengths)
    return 6.0 * num_parameters * sum(lengths) + attention


def peak_bf16_flops(device: str) -> float | None:
    """Return the peak of a device by its name; None if unknown."""
    return next((flops for part, flops in _PEAK_BF16_FLOPS.items() if part in device), None)
