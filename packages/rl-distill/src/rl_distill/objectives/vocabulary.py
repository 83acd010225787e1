"""Logprobs and entropy from logits that may be split over the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabularyLogprobs(torch.autograd.Function):
    """Keeps the probabilities alone for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, group: Any, vocab_size: int | None
    ) -> tuple[Tensor, Tensor]:
        size, rank = _size_and_rank(group)
        scaled = logits.float()
        scaled = scaled / temperature if temperature != 1.0 else scaled.clone() if scaled is logits else scaled
        if vocab_size is not None:
            scaled[:, max(0, vocab_size - rank * logits.shape[-1]) :] = -torch.inf
        largest = _reduced(scaled.amax(-1), dist.ReduceOp.MAX, group, size)
        scaled.sub_(largest.unsqueeze(-1))
        probabilities = scaled.exp()
        total = _reduced(probabilities.sum(-1), dist.ReduceOp.SUM, group, size)
        log_total = total.log()
        probabilities.div_(total.unsqueeze(-1))

        local = targets - rank * logits.shape[-1]
        is_local = (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~is_local, 0).unsqueeze(-1)
        chosen = scaled.gather(-1, local).squeeze(-1).masked_fill_(~is_local, 0.0)
        logprobs = _reduced(chosen, dist.ReduceOp.SUM, group, size) - log_total
        # scaled is 0 at least at the largest logit and finite or -inf elsewhere; 0 * -inf must count as 0.
        expected = (probabilities * scaled.clamp_min_(torch.finfo(scaled.dtype).min)).sum(-1)
        entropy = log_total - _reduced(expected, dist.ReduceOp.SUM, group, size)
        ctx.save_for_backward(probabilities, local, is_local, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
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
        return grad.to(ctx.dtype), None, None, None, None


def _size_and_rank(group: Any) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def _reduced(values: Tensor, operation: Any, group: Any, size: int) -> Tensor:
    if size > 1:
        dist.all_reduce(values, op=operation, group=group)
    return values


def vocabulary_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    group: Any = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs of targets, and the entropy of the distributions they were drawn from.

    Args:
        logits: [M, V / ranks], this rank's slice of the vocabulary.
        targets: [M] int64 token ids.
        temperature: Divides the logits.
        group: The process group over which the vocabulary is split; None when it is not.
        vocab_size: Tokens that there are, where the ranks' slices together are longer: the rest has probability 0
            and gets no gradient. None when they are not.

    Returns:
        Logprobs [M] and entropy [M], float32; the same on every rank.
    """
    return _VocabularyLogprobs.apply(logits, targets, temperature, group, vocab_size)  # type: ignore[no-any-return, no-untyped-call]
