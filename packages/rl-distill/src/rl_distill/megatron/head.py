"""The output matrix and functions of its logits as one autograd node, computed a few tokens at a time.

The full [M, V] logits are never materialized. The forward pass saves the log-sum-exp of each token, and the backward
pass recomputes the logits, or reuses them if they are few.

Based on Wijmans et al. 2024, Cut Your Losses, arXiv:2411.09009.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from rl_distill.architecture.memory import CHUNK_LOGITS
from rl_distill.megatron.experts import gradient_elsewhere
from rl_distill.megatron.layers import compiled
from rl_distill.objectives.chunked_head import added_product
from rl_distill.objectives.logit_divergence import LogitDivergence, TokenComparison
from rl_distill.objectives.teacher_tokens import TeacherTokens
from rl_distill.objectives.vocabulary import VocabularyPart, likeliest

KEPT_LOGITS = 2**25
"""Maximum number of logits saved for the backward pass; on a CPU, also the number computed at once."""
_BLOCK_LOGITS = 2**20
"""Number of logits that a CPU processes at once, so that they stay in its cache."""

P = ParamSpec("P")
R = TypeVar("R")


def logits_at_once(device: torch.device, *, is_alone: bool = False) -> int:
    """Return how many logits to compute at once; on a CPU twice as many for a comparison alone, with fewer arrays."""
    if device.type != "cpu":
        return CHUNK_LOGITS
    return 2 * KEPT_LOGITS if is_alone else KEPT_LOGITS


class OutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's output layer, which applies a given function to its weight.

    Call it as a module, because Megatron's forward hooks ensure that the weight has been gathered.
    """

    def forward(self, compute: Callable[[Tensor], R], weight: Tensor | None = None) -> R:
        """Return the function of the weight [V / ranks, H]: the layer's own, or the tied embedding's."""
        return compute(self.weight if weight is None else weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """Requested functions of the logits besides logprobs and entropy.

    Attributes:
        part: Slice of the vocabulary that this rank's weight covers.
        temperature: Divisor of the logits.
        top_k: Number of most probable tokens to return; None for none.
        divergence: Divergence from teachers; None for none.
        is_fused: True to compile passes over the logits where possible.
        chunk_logits: Number of logits to compute at once; None for the device's default.
    """

    part: VocabularyPart
    temperature: float = 1.0
    top_k: int | None = None
    divergence: LogitDivergence | None = None
    is_fused: bool = False
    chunk_logits: int | None = None

    def chunk(self, weight: Tensor) -> int:
        """Return the number of tokens whose logits are computed at once."""
        return max(1, (self.chunk_logits or logits_at_once(weight.device)) // max(1, weight.shape[0]))

    def blocks(self, logits: Tensor) -> Iterator[slice]:
        """Return slices of rows to process at once."""
        rows = len(logits)
        if logits.device.type == "cpu" and not self.is_fused:
            rows = max(1, _BLOCK_LOGITS // max(1, logits.shape[1]))
        return (slice(start, start + rows) for start in range(0, len(logits), max(1, rows)))

    def run(self, function: Callable[P, R], logits: Tensor) -> Callable[P, R]:
        """Return a function over the logits, compiled if requested."""
        return compiled(function, logits.device.type) if self.is_fused else function


class HeadScores(NamedTuple):
    """Results of the head for M tokens.

    Attributes:
        logprobs: [M] float32 logprobs of the targets, or [M, K] of K targets each.
        entropy: [M] float32 entropy of the distributions.
        top_logprobs: [M, K] float32 logprobs of the most probable tokens in descending order, without gradient; None
            unless requested.
        top_ids: [M, K] int64 ids of those tokens; None unless requested.
        comparison: Comparison with teachers, with a gradient through its losses; None unless requested.
    """

    logprobs: Tensor
    entropy: Tensor
    top_logprobs: Tensor | None
    top_ids: Tensor | None
    comparison: TokenComparison | None


def head_scores(
    hidden: Tensor, weight: Tensor, *, targets: Tensor, request: HeadRequest, teacher: TeacherTokens | None = None
) -> HeadScores:
    """Return logprobs, entropy and other requested results under softmax(hidden @ weight.T / temperature).

    The gradient of a weight with Megatron's `main_grad` is accumulated there.

    Args:
        hidden: [M, H] last hidden states, equal on every rank of the vocabulary.
        weight: [V / ranks, H] slice of this rank.
        targets: [M] int64 token ids, or [M, K] of K targets each; -1 for none.
        request: Other requested results.
        teacher: Teachers' results for the same tokens; needed for `request.divergence`.

    Raises:
        DataError: See `LogitDivergence`.
        ShapeError: The vocabulary has fewer than `request.top_k` tokens; or see `LogitDivergence`.
    """
    compared = None if request.divergence is None else teacher
    has_one = targets.ndim == 1
    work = _HeadWork(targets.unsqueeze(-1) if has_one else targets, request, compared, [], [])
    logprobs, entropy, log_total, losses = _Head.apply(hidden, weight, work)  # type: ignore[no-untyped-call]
    top_logprobs = top_ids = comparison = None
    if request.top_k is not None:
        values, ids = (torch.cat(parts) for parts in zip(*work.likeliest, strict=True))
        top_logprobs, top_ids = values.to(log_total.dtype) * (1.0 / request.temperature) - log_total.unsqueeze(-1), ids
    if compared is not None:
        comparison = TokenComparison.joined(work.compared)._replace(losses=losses)
    logprobs = logprobs.squeeze(-1) if has_one else logprobs
    return HeadScores(logprobs, entropy, top_logprobs, top_ids, comparison)


class _HeadWork(NamedTuple):
    """Inputs and results without gradient; the forward pass fills the lists."""

    targets: Tensor
    request: HeadRequest
    teacher: TeacherTokens | None
    likeliest: list[tuple[Tensor, Tensor]]
    compared: list[TokenComparison]

    def compute_others(self, logits: Tensor, rows: slice) -> None:
        """Compute the requested results of a chunk's logits other than logprobs and entropy."""
        if self.request.top_k is not None:
            self.likeliest.append(likeliest(logits, self.request.top_k, part=self.request.part))
        if self.request.divergence is not None and self.teacher is not None:
            self.compared.append(self.request.divergence(logits, self.teacher.select(rows)))

    def chosen(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return [c, K] columns of the target tokens and whether this rank has them; column 0 where it does not."""
        local = self.targets[rows] - self.request.part.first(logits.shape[1])
        is_local = (local >= 0) & (local < logits.shape[1])
        return local.masked_fill(~is_local, 0), is_local


class _Head(torch.autograd.Function):
    """Logprobs [M, K], and entropy, log-sum-exp and losses, each [M]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, work: _HeadWork) -> tuple[Tensor, ...]:
        request, num_tokens, chunk = work.request, len(hidden), work.request.chunk(weight)
        exact = _exact(weight.dtype)
        sums = torch.empty(3 + work.targets.shape[1], num_tokens, dtype=exact, device=hidden.device)
        # One buffer for all chunks. On a CPU, allocating new memory takes as long as computing on it.
        buffer = weight.new_empty(min(chunk, num_tokens), weight.shape[0])
        for start in range(0, max(1, num_tokens), chunk):
            rows = slice(start, start + chunk)
            logits = torch.mm(hidden[rows], weight.t(), out=buffer[: len(hidden[rows])])
            sums[:, rows] = _sums(logits, rows, work)
            work.compute_others(logits, rows)
        logprobs, entropy, log_total = _over_ranks(sums, request.part)
        is_kept = num_tokens <= chunk and buffer.numel() <= KEPT_LOGITS
        losses = torch.cat([one.losses for one in work.compared]) if work.compared else None
        ctx.save_for_backward(hidden, weight, logprobs, entropy, log_total, buffer if is_kept else None)
        ctx.work = work
        ctx.mark_non_differentiable(log_total)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, log_total, losses  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, logprobs, entropy, log_total, kept = ctx.saved_tensors
        work, (needs_hidden, needs_weight) = ctx.work, ctx.needs_input_grad[:2]
        known = _Known(logprobs, entropy, log_total, grads[0], grads[1], grads[3])
        chunk, total = work.request.chunk(weight), getattr(weight, "main_grad", None)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        buffer = weight.new_empty(min(chunk, len(hidden)), weight.shape[0]) if kept is None else kept
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            h, logits = hidden[rows], buffer[: len(hidden[rows])]
            if kept is None:
                torch.mm(h, weight.t(), out=logits)
            grad = _to_logits(logits, rows, known, work)
            if of_hidden is not None:
                torch.mm(grad, weight, out=of_hidden[rows])
            if needs_weight:
                total = added_product(total, grad.t(), h, dtype=_exact(weight.dtype) if total is None else total.dtype)
        if of_hidden is not None and work.request.part.num_ranks > 1:
            dist.all_reduce(of_hidden, group=work.request.part.group)
        return of_hidden, _weight_grad(weight, total) if needs_weight else None, None


class _Known(NamedTuple):
    """Results of the forward pass and the gradients with respect to them; None without a gradient.

    Those of logprobs are [M, K], the others [M].
    """

    logprobs: Tensor
    entropy: Tensor
    log_total: Tensor
    of_logprobs: Tensor | None
    of_entropy: Tensor | None
    of_losses: Tensor | None


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over the vocabulary."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sums(logits: Tensor, rows: slice, work: _HeadWork) -> Tensor:
    """Return the `_statistics` [3 + K, c] of a chunk, without the padding of the vocabulary."""
    request = work.request
    exact = _exact(logits.dtype)
    places, is_local = work.chosen(logits, rows)
    own = request.part.without_padding(logits)
    out = torch.zeros(3 + places.shape[1], len(logits), dtype=exact, device=logits.device)
    if not own.shape[1]:
        out[0] = torch.finfo(exact).min
        return out
    statistics = request.run(_statistics, logits)
    for few in request.blocks(logits):
        out[:, few] = statistics(own[few], places[few], 1.0 / request.temperature)
    out[3:].masked_fill_(~is_local.T, 0.0)
    return out


def _statistics(logits: Tensor, places: Tensor, scale: float) -> Tensor:
    """Return numbers [3 + K, c] per token, computed from its scaled logits.

    They are the maximum, the sum of exponentials relative to it, the sum of exponentials times shifted logits, and the
    logits at places [c, K].
    """
    scaled = logits.to(_exact(logits.dtype)) * scale
    largest = scaled.amax(-1, keepdim=True)
    chosen = scaled.gather(-1, places)
    shifted = scaled.sub_(largest)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    return torch.stack([largest.squeeze(-1), total, exponentials.mul_(shifted).sum(-1), *chosen.unbind(-1)])


def _over_ranks(sums: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
    """Combine each rank's `_sums` into logprobs [M, K], entropy [M] and log-sum-exp [M]."""
    own, total, weighted, *chosen = sums.unbind()
    largest = part.largest(own.clone())
    lower = own - largest
    factor = lower.exp()
    sums = torch.stack([factor * total, factor * (weighted + lower * total), *chosen])
    total, weighted, *chosen = part.summed(sums).unbind()
    log_total = total.log()
    logprobs = torch.stack(chosen, -1) - largest.unsqueeze(-1) - log_total.unsqueeze(-1)
    return logprobs, log_total - weighted / total, largest + log_total


def _to_logits(logits: Tensor, rows: slice, known: _Known, work: _HeadWork) -> Tensor:
    """Return the gradient with respect to a chunk's logits, computed in place."""
    request = work.request
    other = None
    if known.of_losses is not None and request.divergence is not None and work.teacher is not None:
        own = logits.to(_exact(logits.dtype), copy=True)
        other = request.divergence.with_gradient(own, work.teacher.select(rows), known.of_losses[rows])[1]
    if known.of_logprobs is None and known.of_entropy is None:
        logits.zero_()
    else:
        _of_tokens(logits, rows, known, work)
    return logits if other is None else logits.add_(other)


def _of_tokens(logits: Tensor, rows: slice, known: _Known, work: _HeadWork) -> None:
    """Replace the logits by the gradient of logprobs and entropy."""
    request = work.request
    scale = 1.0 / request.temperature
    logprobs = known.logprobs[rows]
    entropy, log_total = (values[rows].unsqueeze(-1) for values in (known.entropy, known.log_total))
    of_logprobs = torch.zeros_like(logprobs) if known.of_logprobs is None else known.of_logprobs[rows] * -scale
    # Gradient of every logit but the targets': probability * (flat + slope * logprob).
    flat, slope = of_logprobs.sum(-1, keepdim=True), None
    at_target = of_logprobs * torch.expm1(logprobs)
    if logprobs.shape[1] > 1:
        targets = work.targets[rows]
        of_equal = ((targets.unsqueeze(-1) == targets.unsqueeze(-2)) * of_logprobs.unsqueeze(-2)).sum(-1)
        at_target = of_equal * torch.expm1(logprobs) + logprobs.exp() * (flat - of_equal)
    if known.of_entropy is not None:
        slope = known.of_entropy[rows].unsqueeze(-1) * -scale
        flat = flat + slope * entropy
        at_target = at_target + logprobs.exp() * slope * (entropy + logprobs)
    elif request.is_fused:
        slope = torch.zeros_like(flat)  # so that one compiled function serves both cases
    own = request.part.without_padding(logits)
    put_gradient = request.run(_put_gradient, logits)
    for few in request.blocks(logits):
        put_gradient(own[few], log_total[few], flat[few], None if slope is None else slope[few], scale)
    logits[:, own.shape[1] :] = 0.0
    places, is_local = work.chosen(logits, rows)
    # The targets' gradients are written separately because the logits' dtype would lose their difference from 1.
    at_target = at_target.to(logits.dtype)
    for at, is_own, value in zip(*(torch.split(one, 1, -1) for one in (places, is_local, at_target)), strict=True):
        logits.scatter_(-1, at, torch.where(is_own, value, logits.gather(-1, at)))


def _put_gradient(logits: Tensor, log_total: Tensor, flat: Tensor, slope: Tensor | None, scale: float) -> None:
    """Replace every logit [c, V] by probability * (flat + slope * logprob); the other tensors are [c, 1]."""
    logprobs = (logits.to(log_total.dtype) * scale).sub_(log_total)
    if slope is None:
        logits.copy_(logprobs.exp_().mul_(flat))
    else:
        probabilities = logprobs.exp()
        logits.copy_(logprobs.mul_(slope).add_(flat).mul_(probabilities))


def _weight_grad(weight: Tensor, total: Tensor | None) -> Tensor | None:
    """Return the weight's gradient for autograd, which may already be in Megatron's buffer."""
    if not hasattr(weight, "main_grad"):
        return torch.zeros_like(weight) if total is None else total.to(weight.dtype)
    if getattr(weight, "zero_out_wgrad", False):
        return None  # Megatron adds the embedding's own gradient, which also signals that one exists
    return gradient_elsewhere(weight)
