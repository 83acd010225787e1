"""Logprobs and entropy from logits, which may be sharded over the vocabulary."""

from typing import Any

import torch
from torch import Tensor

from rl_distill.objectives.vocabulary_parts import VocabularyPart


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
