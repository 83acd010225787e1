"""Logprobs and entropy from logits that may be sharded by vocabulary: of selected, all or the most likely tokens.

Every function returns the same result on every rank, except for slices of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.errors import ShapeError


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The slice of the vocabulary that this rank's logits cover.

    Attributes:
        size: Size of the whole vocabulary; padding columns beyond it are ignored.
        group: Process group whose ranks each have a slice of equal length; None if this rank has the whole vocabulary.
    """

    size: int
    group: Any = None

    @property
    def num_ranks(self) -> int:
        """Number of slices."""
        return 1 if self.group is None else int(self.group.size())

    def first(self, width: int) -> int:
        """Return the token id of the first column of this rank's slice, given the slice's width."""
        return 0 if self.group is None else int(self.group.rank()) * width

    def without_padding(self, logits: Tensor) -> Tensor:
        """Return the columns [M, V] that stand for tokens, without padding.

        Raises:
            ShapeError: The logits are not [M, V / ranks].
        """
        width = logits.shape[-1]
        if logits.ndim != 2 or width * self.num_ranks < self.size:
            raise ShapeError(
                f"logits must be [M, V] with at least {-(-self.size // self.num_ranks)} columns ({self.size} tokens, "
                f"{self.num_ranks} tensor-parallel ranks); found {list(logits.shape)}."
            )
        num_tokens = min(width, max(0, self.size - self.first(width)))
        return logits if num_tokens == width else logits[:, :num_tokens]

    def summed(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Take the maximum over ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values


def _shifted(logits: Tensor, temperature: float, part: VocabularyPart, *, in_place: bool = False) -> Tensor:
    """Return float logits without padding, divided by the temperature, shifted to a maximum of 0; new or in place."""
    scaled = part.without_padding(logits)
    if not in_place:
        scaled = scaled.to(torch.promote_types(scaled.dtype, torch.float32), copy=True)
    scaled = scaled.div_(temperature) if temperature != 1.0 else scaled
    largest = scaled.amax(-1) if scaled.shape[-1] else scaled.new_full(scaled.shape[:1], -torch.inf)
    return scaled.sub_(part.largest(largest).unsqueeze(-1))


def _of_logits(grad: Tensor, ctx: Any) -> Tensor:
    """Return the gradient of the logits from that of the scaled ones, which have no padding."""
    if ctx.temperature != 1.0:
        grad /= ctx.temperature
    if grad.shape[-1] < ctx.width:
        grad = torch.nn.functional.pad(grad, (0, ctx.width - grad.shape[-1]))
    return grad.to(ctx.dtype)


class TopKLogprobs(NamedTuple):
    """Logprobs of K tokens, and the state needed for their gradient with respect to the logits.

    Attributes:
        logprobs: [M, K] logprobs; 0 where the id is -1.
        log_tail: [M] log of the total probability of all other tokens.
        exponentials: [M, V of this rank] exponentials of the shifted logits, 0 at the K tokens; the only wide tensor.
        tail: [M] sum of the exponentials over ranks.
        total: [M] `tail` plus the exponentials of the K tokens.
        is_given: [M, K] bool, False where the id is -1.
        columns: [M, K] int64 columns of the K tokens in this rank's slice, 0 for tokens of other slices.
        is_own: [M, K] bool, True for tokens of this rank's slice.
    """

    logprobs: Tensor
    log_tail: Tensor
    exponentials: Tensor
    tail: Tensor
    total: Tensor
    is_given: Tensor
    columns: Tensor
    is_own: Tensor

    @staticmethod
    def of(scaled: Tensor, ids: Tensor, *, first: int, part: VocabularyPart) -> "TopKLogprobs":
        """Compute the logprobs from shifted logits [M, V of this rank], which are overwritten with the exponentials."""
        is_given = ids >= 0
        is_own = is_given & (ids >= first) & (ids < first + scaled.shape[-1])
        columns, chosen = (ids - first).masked_fill(~is_own, 0), scaled.new_zeros(ids.shape)
        has_columns = scaled.shape[-1] > 0  # a slice may consist of padding only
        if has_columns:
            chosen = scaled.gather(-1, columns).masked_fill(~is_own, 0.0)
        exponentials = scaled.exp_()
        if has_columns:  # exponentials are >= 0; entries of other slices must leave column 0 unchanged
            zeros = torch.zeros_like(chosen).masked_fill_(~is_own, torch.inf)
            exponentials.scatter_reduce_(-1, columns, zeros, "amin")
        sums = part.summed(torch.cat([chosen, exponentials.sum(-1, keepdim=True)], -1))
        chosen, tail = sums[:, :-1], sums[:, -1]
        total = (chosen.exp() * is_given).sum(-1) + tail
        return TopKLogprobs(
            logprobs=torch.where(is_given, chosen - total.log().unsqueeze(-1), 0.0),
            log_tail=tail.clamp_min(torch.finfo(tail.dtype).tiny).log() - total.log(),
            exponentials=exponentials,
            tail=tail,
            total=total,
            is_given=is_given,
            columns=columns,
            is_own=is_own,
        )

    def gradient(self, grad_logprobs: Tensor, grad_tail: Tensor, *, in_place: bool = False) -> Tensor:
        """Return the gradient [M, V of this rank] for the shifted logits; new, or in place of the exponentials."""
        grad_logprobs = grad_logprobs * self.is_given
        tiny = torch.finfo(self.tail.dtype).tiny
        grad_tail = torch.where(self.tail > tiny, grad_tail, 0.0)
        summed = grad_logprobs.sum(-1) + grad_tail
        outside = (grad_tail / self.tail.clamp_min(tiny) - summed / self.total).unsqueeze(-1)
        grad = self.exponentials.mul_(outside) if in_place else self.exponentials * outside
        if not grad.shape[-1]:
            return grad
        chosen = grad_logprobs - self.logprobs.exp() * summed.unsqueeze(-1)
        # The K tokens' entries are still 0, since their exponentials are; other slices' entries add 0 to column 0.
        return grad.scatter_add_(-1, self.columns, chosen.masked_fill(~self.is_own, 0.0))


class _TopKFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, part: VocabularyPart
    ) -> tuple[Tensor, Tensor]:
        found = TopKLogprobs.of(_shifted(logits, temperature, part), ids, first=part.first(logits.shape[-1]), part=part)
        ctx.save_for_backward(*found)
        ctx.temperature, ctx.dtype, ctx.width = temperature, logits.dtype, logits.shape[-1]
        return found.logprobs, found.log_tail

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = TopKLogprobs(*ctx.saved_tensors).gradient(*grads)
        return _of_logits(grad, ctx), None, None, None


def top_k_logprobs(
    logits: Tensor, ids: Tensor, *, part: VocabularyPart, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return logprobs of K tokens, and of all other tokens together.

    Args:
        logits: [M, V / ranks] logits of this rank's slice.
        ids: [M, K] int64 tokens, distinct within a row; -1 for none.
        part: This rank's slice of the vocabulary.
        temperature: Divides the logits.

    Returns:
        [M, K] logprobs, 0 where the id is -1, and [M] log of the probability outside; float32, or float64 for float64
        logits.
    """
    return _TopKFunction.apply(logits, ids, temperature, part)  # type: ignore[no-any-return, no-untyped-call]


def take_top_k(logits: Tensor, ids: Tensor, *, part: VocabularyPart, temperature: float = 1.0) -> TopKLogprobs:
    """Compute `top_k_logprobs` in the memory of the logits; `gradient` can reuse it too.

    Args:
        logits: [M, V / ranks] float32 or float64; overwritten.
        ids: [M, K] int64 tokens.
        part: This rank's slice of the vocabulary.
        temperature: Divides the logits.
    """
    scaled = _shifted(logits, temperature, part, in_place=True)
    return TopKLogprobs.of(scaled, ids, first=part.first(logits.shape[-1]), part=part)


class _AllLogprobs(torch.autograd.Function):
    """Log-softmax over all slices."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float, part: VocabularyPart) -> Tensor:
        scaled = _shifted(logits, temperature, part)
        scaled.sub_(part.summed(scaled.exp().sum(-1)).log().unsqueeze(-1))
        ctx.save_for_backward(scaled)
        ctx.temperature, ctx.dtype, ctx.width, ctx.part = temperature, logits.dtype, logits.shape[-1], part
        return scaled

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (logprobs,) = ctx.saved_tensors
        summed = ctx.part.summed(grads[0].sum(-1))
        grad = torch.addcmul(grads[0], logprobs.exp(), summed.unsqueeze(-1), value=-1.0)
        return _of_logits(grad, ctx), None, None


def all_logprobs(logits: Tensor, *, part: VocabularyPart, temperature: float = 1.0) -> Tensor:
    """Return logprobs [M, V of this rank] of this rank's slice without padding, with gradient."""
    return _AllLogprobs.apply(logits, temperature, part)  # type: ignore[no-any-return, no-untyped-call]


def likeliest(logits: Tensor, k: int, *, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Return the k largest logits [M, k] over all slices, in descending order, and their int64 tokens; no gradient.

    Raises:
        ShapeError: The vocabulary has fewer than k tokens.
    """
    if not 0 <= k <= part.size:
        raise ShapeError(f"k must be in [0, {part.size}], the size of the vocabulary; found {k}.")
    first = part.first(logits.shape[-1])
    own = part.without_padding(logits.detach())
    values, ids = own.topk(min(k, own.shape[-1]), dim=-1)
    ids = ids + first
    if part.num_ranks == 1:
        return values, ids
    short = k - values.shape[-1]
    values = torch.nn.functional.pad(values, (0, short), value=-torch.inf).contiguous()
    ids = torch.nn.functional.pad(ids, (0, short), value=-1).contiguous()
    all_values = [torch.empty_like(values) for _ in range(part.num_ranks)]
    all_ids = [torch.empty_like(ids) for _ in range(part.num_ranks)]
    dist.all_gather(all_values, values, group=part.group)
    dist.all_gather(all_ids, ids, group=part.group)
    values, places = torch.cat(all_values, -1).topk(k, dim=-1)
    return values, torch.cat(all_ids, -1).gather(-1, places)


def nucleus_logprobs(logprobs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logprobs of tokens drawn from a truncated distribution, and its entropy, with gradient.

    Args:
        logprobs: [M, 1 + K] logprobs, of the token and of the K tokens that top-k and top-p kept.
        ids: [M, 1 + K] int64 ids of these tokens, -1 for none.

    Returns:
        [M] logprobs and [M] entropy; both are 0 for a token without others.
    """
    is_kept = torch.cat(
        [torch.ones_like(ids[:, :1], dtype=torch.bool), (ids[:, 1:] >= 0) & (ids[:, 1:] != ids[:, :1])], -1
    )
    kept = logprobs.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    entropy = -(kept.exp() * kept.masked_fill(~is_kept, 0.0)).sum(-1)
    return kept[:, 0], entropy


class _VocabularyLogprobs(torch.autograd.Function):
    """Computes logprobs and entropy, and saves only the probabilities for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, part: VocabularyPart
    ) -> tuple[Tensor, Tensor]:
        first = part.first(logits.shape[-1])
        scaled = logits.float()
        scaled = scaled / temperature if temperature != 1.0 else scaled.clone() if scaled is logits else scaled
        scaled[:, max(0, part.size - first) :] = -torch.inf
        scaled.sub_(part.largest(scaled.amax(-1)).unsqueeze(-1))
        probabilities = scaled.exp()
        total = part.summed(probabilities.sum(-1))
        log_total = total.log()
        probabilities.div_(total.unsqueeze(-1))

        local = targets - first
        is_local = (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~is_local, 0).unsqueeze(-1)
        chosen = scaled.gather(-1, local).squeeze(-1).masked_fill_(~is_local, 0.0)
        logprobs = part.summed(chosen) - log_total
        # scaled is 0 at the largest logit and finite or -inf elsewhere; clamp it, so that 0 * -inf counts as 0.
        expected = (probabilities * scaled.clamp_min_(torch.finfo(scaled.dtype).min)).sum(-1)
        entropy = log_total - part.summed(expected)
        ctx.save_for_backward(probabilities, local, is_local, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        probabilities, local, is_local, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad = torch.zeros_like(probabilities)
        if grad_logprobs is not None:
            grad.addcmul_(probabilities, grad_logprobs.unsqueeze(-1), value=-1.0)
            grad.scatter_add_(-1, local, (grad_logprobs * is_local).unsqueeze(-1))
        if grad_entropy is not None:
            logs = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log_()
            logs.add_(entropy.unsqueeze(-1)).mul_(probabilities)
            grad.addcmul_(logs, grad_entropy.unsqueeze(-1), value=-1.0)
        if ctx.temperature != 1.0:
            grad.div_(ctx.temperature)
        return grad.to(ctx.dtype), None, None, None


def vocabulary_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the logprobs of targets, and the entropy of their distributions.

    Args:
        logits: [M, V / ranks] logits of this rank's slice of the vocabulary.
        targets: [M] int64 token ids.
        temperature: Divides the logits.
        part: This rank's slice; None if the vocabulary is not sharded. Padding columns beyond the vocabulary have
            probability 0 and get no gradient.

    Returns:
        Logprobs [M] and entropy [M], float32; the same on every rank.
    """
    part = VocabularyPart(logits.shape[-1]) if part is None else part
    return _VocabularyLogprobs.apply(logits, targets, temperature, part)  # type: ignore[no-any-return, no-untyped-call]
