"""The output matrix and what is asked of its logits in one node of autograd, a few tokens at a time.

No [M, V] array is ever whole: of each token the forward pass keeps the log of the sum of exponentials, and the backward
pass makes the logits again; where they are few they are kept.

Source of the idea: Wijmans et al. 2024, Cut Your Losses, arXiv:2411.09009.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from rl_distill.megatron.layers.compiled import compiled
from rl_distill.megatron.mixtures.experts import gradient_elsewhere
from rl_distill.objectives.chunked_head import added_product
from rl_distill.objectives.logit_divergence import LogitDivergence, TokenComparison
from rl_distill.objectives.teacher_tokens import TeacherTokens
from rl_distill.objectives.vocabulary_parts import VocabularyPart, likeliest

KEPT_LOGITS = 2**25
"""So many logits are kept for the backward pass; and on a CPU so many are made at once."""
CHUNK_LOGITS = 2**28
"""Logits that are made at once on a GPU: some thousand tokens, for a product that fills it."""
_BLOCK_LOGITS = 2**20
"""Logits that a CPU goes over at once, so that they stay in its cache."""

P = ParamSpec("P")
R = TypeVar("R")


def logits_at_once(device: torch.device, *, is_alone: bool = False) -> int:
    """How many logits suit a device; where a comparison is alone, which needs fewer arrays, twice as many on a CPU."""
    if device.type != "cpu":
        return CHUNK_LOGITS
    return 2 * KEPT_LOGITS if is_alone else KEPT_LOGITS


class OutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """megatron's output layer, computing what it is given with its weight.

    It is called as a module, since megatron's hooks see to it that the weight has arrived.
    """

    def forward(self, compute: Callable[[Tensor], R], weight: Tensor | None = None) -> R:
        """What the function gives of the weight [V / ranks, H]: its own, or the tied embedding's."""
        return compute(self.weight if weight is None else weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of the logits besides logprobs and entropy.

    Attributes:
        part: The slice of the vocabulary that this rank's weight is of.
        temperature: Divides the logits.
        top_k: So many likeliest tokens; None for none.
        divergence: From teachers; None for none.
        is_fused: Passes over the logits are compiled, where they can be.
        chunk_logits: Logits that are made at once; None for what suits the device.
    """

    part: VocabularyPart
    temperature: float = 1.0
    top_k: int | None = None
    divergence: LogitDivergence | None = None
    is_fused: bool = False
    chunk_logits: int | None = None

    def chunk(self, weight: Tensor) -> int:
        """Tokens whose logits are made at once."""
        return max(1, (self.chunk_logits or logits_at_once(weight.device)) // max(1, weight.shape[0]))

    def blocks(self, logits: Tensor) -> Iterator[slice]:
        """Rows of logits to go over at once."""
        rows = len(logits)
        if logits.device.type == "cpu" and not self.is_fused:
            rows = max(1, _BLOCK_LOGITS // max(1, logits.shape[1]))
        return (slice(start, start + rows) for start in range(0, len(logits), max(1, rows)))

    def run(self, function: Callable[P, R], logits: Tensor) -> Callable[P, R]:
        """A pass over the logits."""
        return compiled(function, logits.device.type) if self.is_fused else function


class HeadScores(NamedTuple):
    """What comes out of the head at each of M tokens.

    Attributes:
        logprobs: [M] float32, of the tokens.
        entropy: [M] float32, of the distributions.
        top_logprobs: [M, K] float32 of the likeliest tokens, falling, without gradient; None unless asked for.
        top_ids: [M, K] int64 likewise.
        comparison: Comparison with teachers, whose losses have a gradient; None unless requested.
    """

    logprobs: Tensor
    entropy: Tensor
    top_logprobs: Tensor | None
    top_ids: Tensor | None
    comparison: TokenComparison | None


def head_scores(
    hidden: Tensor, weight: Tensor, *, targets: Tensor, asked: Asked, teacher: TeacherTokens | None = None
) -> HeadScores:
    """Logprobs and entropy of tokens under softmax(hidden @ weight.T / temperature), and what else is asked for.

    The gradient to a weight that has megatron's `main_grad` is added there.

    Args:
        hidden: [M, H] last hidden states, the same on every rank of the vocabulary.
        weight: [V / ranks, H] this rank's slice.
        targets: [M] int64 token ids.
        asked: What else.
        teacher: What teachers said of the same tokens, for `asked.divergence`.

    Raises:
        DataError: As `LogitDivergence`.
        ShapeError: Fewer tokens than `asked.top_k`, or as `LogitDivergence`.
    """
    compared = None if asked.divergence is None else teacher
    work = _Work(targets, asked, compared, [], [])
    logprobs, entropy, log_total, losses = _Head.apply(hidden, weight, work)  # type: ignore[no-untyped-call]
    top_logprobs = top_ids = comparison = None
    if asked.top_k is not None:
        values, ids = (torch.cat(parts) for parts in zip(*work.likeliest, strict=True))
        top_logprobs, top_ids = values.to(log_total.dtype) * (1.0 / asked.temperature) - log_total.unsqueeze(-1), ids
    if compared is not None:
        comparison = TokenComparison.joined(work.compared)._replace(losses=losses)
    return HeadScores(logprobs, entropy, top_logprobs, top_ids, comparison)


class _Work(NamedTuple):
    """What has no gradient; lists are filled by the forward pass."""

    targets: Tensor
    asked: Asked
    teacher: TeacherTokens | None
    likeliest: list[tuple[Tensor, Tensor]]
    compared: list[TokenComparison]

    def look(self, logits: Tensor, rows: slice) -> None:
        """Find what is asked of a chunk's logits besides logprobs and entropy."""
        if self.asked.top_k is not None:
            self.likeliest.append(likeliest(logits, self.asked.top_k, part=self.asked.part))
        if self.asked.divergence is not None and self.teacher is not None:
            self.compared.append(self.asked.divergence(logits, self.teacher.select(rows)))

    def chosen(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """[c, 1] columns of the tokens, and whether this rank has them; column 0 where it has not."""
        local = self.targets[rows].unsqueeze(-1) - self.asked.part.first(logits.shape[1])
        is_local = (local >= 0) & (local < logits.shape[1])
        return local.masked_fill(~is_local, 0), is_local


class _Head(torch.autograd.Function):
    """Logprobs, entropy, log of the sum of exponentials, and losses, [M] each."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, work: _Work) -> tuple[Tensor, ...]:
        asked, num_tokens, chunk = work.asked, len(hidden), work.asked.chunk(weight)
        exact = _exact(weight.dtype)
        sums = torch.empty(4, num_tokens, dtype=exact, device=hidden.device)
        # One buffer for all chunks: fresh memory is slow, on a CPU as slow as the arithmetic on it.
        buffer = weight.new_empty(min(chunk, num_tokens), weight.shape[0])
        for start in range(0, max(1, num_tokens), chunk):
            rows = slice(start, start + chunk)
            logits = torch.mm(hidden[rows], weight.t(), out=buffer[: len(hidden[rows])])
            sums[:, rows] = _sums(logits, rows, work)
            work.look(logits, rows)
        logprobs, entropy, log_total = _over_ranks(sums, asked.part)
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
        chunk, total = work.asked.chunk(weight), getattr(weight, "main_grad", None)
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
        if of_hidden is not None and work.asked.part.num_ranks > 1:
            dist.all_reduce(of_hidden, group=work.asked.part.group)
        return of_hidden, _weight_grad(weight, total) if needs_weight else None, None


class _Known(NamedTuple):
    """[M] each: what the forward pass found, and the gradients to what it gave, None where there are none."""

    logprobs: Tensor
    entropy: Tensor
    log_total: Tensor
    of_logprobs: Tensor | None
    of_entropy: Tensor | None
    of_losses: Tensor | None


def _exact(dtype: torch.dtype) -> torch.dtype:
    """In which sums over the vocabulary are taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sums(logits: Tensor, rows: slice, work: _Work) -> Tensor:
    """[4, c] of a chunk, as `_statistics`; what pads the vocabulary is left out."""
    asked = work.asked
    exact = _exact(logits.dtype)
    places, is_local = work.chosen(logits, rows)
    own = asked.part.without_padding(logits)
    out = torch.zeros(4, len(logits), dtype=exact, device=logits.device)
    if not own.shape[1]:
        out[0] = torch.finfo(exact).min
        return out
    statistics = asked.run(_statistics, logits)
    for few in asked.blocks(logits):
        out[:, few] = statistics(own[few], places[few], 1.0 / asked.temperature)
    out[3].masked_fill_(~is_local.squeeze(-1), 0.0)
    return out


def _statistics(logits: Tensor, places: Tensor, scale: float) -> Tensor:
    """Four numbers [4, c] of each token's scaled logits, relative to the largest.

    They are the largest, the sum of exponentials, the sum of exponentials times logits, and the logit at places [c, 1].
    """
    scaled = logits.to(_exact(logits.dtype)) * scale
    largest = scaled.amax(-1, keepdim=True)
    chosen = scaled.gather(-1, places)
    shifted = scaled.sub_(largest)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    return torch.stack([largest.squeeze(-1), total, exponentials.mul_(shifted).sum(-1), chosen.squeeze(-1)])


def _over_ranks(sums: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and the log of the sum of exponentials, [M] each, from each rank's `_sums`."""
    own, total, weighted, chosen = sums.unbind()
    largest = part.largest(own.clone())
    lower = own - largest
    factor = lower.exp()
    total, weighted, chosen = part.summed(torch.stack([factor * total, factor * (weighted + lower * total), chosen]))
    log_total = total.log()
    return chosen - largest - log_total, log_total - weighted / total, largest + log_total


def _to_logits(logits: Tensor, rows: slice, known: _Known, work: _Work) -> Tensor:
    """The gradient to a chunk's logits, in their place."""
    asked = work.asked
    other = None
    if known.of_losses is not None and asked.divergence is not None and work.teacher is not None:
        own = logits.to(_exact(logits.dtype), copy=True)
        other = asked.divergence.with_gradient(own, work.teacher.select(rows), known.of_losses[rows])[1]
    if known.of_logprobs is None and known.of_entropy is None:
        logits.zero_()
    else:
        _of_tokens(logits, rows, known, work)
    return logits if other is None else logits.add_(other)


def _of_tokens(logits: Tensor, rows: slice, known: _Known, work: _Work) -> None:
    """Put the gradient of logprobs and entropy in the logits' place."""
    asked = work.asked
    scale = 1.0 / asked.temperature
    logprobs, entropy, log_total = (values[rows].unsqueeze(-1) for values in known[:3])
    of_logprobs = torch.zeros_like(logprobs) if known.of_logprobs is None else known.of_logprobs[rows].unsqueeze(-1)
    # Of a token other than the target: probability * (flat + slope * its logprob).
    flat, slope = of_logprobs * -scale, None
    at_target = of_logprobs * -scale * torch.expm1(logprobs)
    if known.of_entropy is not None:
        slope = known.of_entropy[rows].unsqueeze(-1) * -scale
        flat = flat + slope * entropy
        at_target = at_target + logprobs.exp() * slope * (entropy + logprobs)
    elif asked.is_fused:
        slope = torch.zeros_like(flat)  # one compiled form for both
    own = asked.part.without_padding(logits)
    put_gradient = asked.run(_put_gradient, logits)
    for few in asked.blocks(logits):
        put_gradient(own[few], log_total[few], flat[few], None if slope is None else slope[few], scale)
    logits[:, own.shape[1] :] = 0.0
    places, is_local = work.chosen(logits, rows)
    # Written after rounding to the logits' dtype, in which a difference from 1 would be lost.
    logits.scatter_(-1, places, torch.where(is_local, at_target.to(logits.dtype), logits.gather(-1, places)))


def _put_gradient(logits: Tensor, log_total: Tensor, flat: Tensor, slope: Tensor | None, scale: float) -> None:
    """Put probability * (flat + slope * logprob) in the place of every logit [c, V], from [c, 1] each."""
    logprobs = (logits.to(log_total.dtype) * scale).sub_(log_total)
    if slope is None:
        logits.copy_(logprobs.exp_().mul_(flat))
    else:
        probabilities = logprobs.exp()
        logits.copy_(logprobs.mul_(slope).add_(flat).mul_(probabilities))


def _weight_grad(weight: Tensor, total: Tensor | None) -> Tensor | None:
    """What autograd gets, where megatron's buffer may have the gradient."""
    if not hasattr(weight, "main_grad"):
        return torch.zeros_like(weight) if total is None else total.to(weight.dtype)
    if getattr(weight, "zero_out_wgrad", False):
        return None  # the embedding's own gradient tells megatron that there is one, and is added by it
    return gradient_elsewhere(weight)
