"""Divergences between a teacher's distribution p and a student's q, from their logprobs.

Sources: forward and reverse KL, Hinton et al. 2015, arXiv:1503.02531, and Gu et al. 2023, arXiv:2306.08543; the
generalised Jensen-Shannon divergence, Agarwal et al. 2023, arXiv:2306.13649; sorted probabilities for two vocabularies
(ULD), Boizard et al. 2024, arXiv:2402.12030.
"""

import math
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from rl_core.errors import ShapeError
from rl_core.record_fields import PositiveFloat, settings_record

DivergenceKind = Literal["forward_kl", "reverse_kl", "js", "uld"]
Tail = Literal["bucket", "drop", "renormalise"]

LOWEST_LOGPROB = -1e4
"""Replaces -inf, so that a token impossible on both sides adds 0 instead of NaN; its probability rounds to 0."""


@settings_record
class ComparisonOptions:
    """How the distributions of teacher and student are compared.

    Attributes:
        distribution: "top_k" compares the teacher's most likely tokens, "full" all tokens.
        tail: Treatment of the probability outside the top k. "bucket" adds it as one entry, so that the sum is a
            divergence of two distributions, and 0 only where they agree. "drop" leaves it out: the sum may be negative,
            and at q = p its gradient still moves the student's mass into the top k. "renormalise" scales both to 1
            within the top k.
        beta: Weight of the teacher in "js".
        temperature: Divides both sides' logits.
        max_loss: Maximum loss of a token; larger values are clamped and get no gradient. None disables it.
        min_logprob: Minimum logprob on either side; smaller ones are clamped and get no gradient. None disables it.
    """

    distribution: Literal["top_k", "full"] = "top_k"
    tail: Tail = "bucket"
    beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    temperature: PositiveFloat = 1.0
    max_loss: PositiveFloat | None = None
    min_logprob: Annotated[float, Gt(-math.inf), Lt(0)] | None = None


@settings_record
class DivergenceOptions(ComparisonOptions):
    """Options of a divergence.

    Attributes:
        kind: "forward_kl", KL(p || q); "reverse_kl", KL(q || p); "js", beta KL(p || m) + (1 - beta) KL(q || m) with
            m = beta p + (1 - beta) q; or "uld", the sum of |p - q| over probabilities sorted by size, which needs no
            common vocabulary.
    """

    kind: DivergenceKind = "forward_kl"


TokenDivergence = tuple[Tensor, Tensor]
"""[M] divergence of each token, differentiable with respect to the student's logprobs; [M] bool, True where clamped."""


def divergence_terms(log_p: Tensor, log_q: Tensor, options: DivergenceOptions) -> Tensor:
    """Return each entry's contribution to the divergence of two distributions.

    Args:
        log_p: [..., N] the teacher's logprobs.
        log_q: [..., N] the student's logprobs.
        options: Selects the divergence.
    """
    floor = LOWEST_LOGPROB if options.min_logprob is None else options.min_logprob
    log_p, log_q = log_p.clamp_min(floor), log_q.clamp_min(floor)
    p, q = log_p.exp(), log_q.exp()
    if options.kind == "forward_kl":
        return p * (log_p - log_q)
    if options.kind == "reverse_kl":
        return q * (log_q - log_p)
    if options.kind == "uld":
        return (p - q).abs()
    beta = options.beta
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * p * (log_p - log_m) + (1.0 - beta) * q * (log_q - log_m)


def top_k_divergence(
    log_p: Tensor, log_q: Tensor, log_q_tail: Tensor, *, is_given: Tensor, num_tokens: int, options: DivergenceOptions
) -> TokenDivergence:
    """Return the divergence on K entries; the options set how the mass outside counts.

    Args:
        log_p: [M, K] the teacher's logprobs.
        log_q: [M, K] the student's logprobs of the same entries.
        log_q_tail: [M] log of the student's mass outside these entries.
        is_given: [M, K] bool, False at entries to ignore.
        num_tokens: Size of the vocabulary; a row with as many entries has no mass outside.
        options: Selects the divergence and the treatment of the tail.

    Raises:
        ShapeError: The shapes do not match.
    """
    if log_p.ndim != 2 or log_p.shape != log_q.shape or log_q_tail.shape != log_p.shape[:1]:
        raise ShapeError(
            "log_p and log_q must be [M, K] and log_q_tail [M]; found "
            f"{list(log_p.shape)}, {list(log_q.shape)} and {list(log_q_tail.shape)}."
        )
    log_p = log_p.masked_fill(~is_given, -torch.inf)
    log_q = log_q.masked_fill(~is_given, -torch.inf)
    if options.tail == "renormalise":
        log_p = log_p - log_p.clamp_min(LOWEST_LOGPROB).logsumexp(-1, keepdim=True)
        log_q = log_q - log_q.clamp_min(LOWEST_LOGPROB).logsumexp(-1, keepdim=True)
    elif options.tail == "bucket":
        has_tail = is_given.sum(-1, keepdim=True) < num_tokens
        tails = [one.unsqueeze(-1).masked_fill(~has_tail, -torch.inf) for one in (log_tail(log_p), log_q_tail)]
        log_p, log_q = (torch.cat(pair, -1) for pair in zip((log_p, log_q), tails, strict=True))
        is_given = torch.cat([is_given, has_tail], -1)
    losses = divergence_terms(log_p, log_q, options).sum(-1)
    return clamped(losses, _bites(log_p, log_q, is_given, options), options)


def log_tail(log_p: Tensor) -> Tensor:
    """Return [M] log of the mass outside the entries [M, K], bounded below by their rounding error."""
    mass = 1.0 - log_p.double().exp().sum(-1)
    return mass.clamp_min(torch.finfo(log_p.dtype).eps).log().to(log_p.dtype)


def clamped(losses: Tensor, is_bitten: Tensor, options: DivergenceOptions) -> TokenDivergence:
    """Clamp losses [M] to max_loss; also return [M] bool, True where either clamp applied."""
    if options.max_loss is None:
        return losses, is_bitten
    return losses.clamp(max=options.max_loss), is_bitten | (losses.detach() > options.max_loss)


def _bites(log_p: Tensor, log_q: Tensor, is_given: Tensor, options: DivergenceOptions) -> Tensor:
    """Return [M] bool, True where min_logprob changes a counted entry."""
    if options.min_logprob is None:
        return torch.zeros(len(log_p), dtype=torch.bool, device=log_p.device)
    return (((log_p < options.min_logprob) | (log_q.detach() < options.min_logprob)) & is_given).any(-1)
