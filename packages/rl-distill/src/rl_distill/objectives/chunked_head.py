"""Output matrix and divergence fused over chunks of tokens, without materializing the [T, V] logits.

Gradients are computed in the forward pass, while a chunk's logits exist, so nothing is computed twice.

Source: Hsu et al. 2024, Liger Kernel, arXiv:2410.10989.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.errors import NotReadyError, ShapeError
from rl_core.record_fields import converts_arguments
from rl_distill.objectives.logit_divergence import LogitDivergence, TokenComparison
from rl_distill.objectives.teacher_tokens import TeacherTokens, check_sampled_tokens
from rl_distill.objectives.vocabulary import vocabulary_logprobs

CHUNK_LOGITS = 2**26
"""Default number of logits per chunk. A chunk needs one array of this size, or several for full distributions."""
TARGETS_AT_ONCE = 16
"""Tokens per chunk on CPUs, sized for their cache. GPUs use `GPU_TARGETS_AT_ONCE`, since each chunk costs launches."""
GPU_TARGETS_AT_ONCE = 1024


class HeadResult(NamedTuple):
    """Results of the head at M tokens.

    Attributes:
        weighted: [M] losses times their weights, with gradient; sum them to get the loss.
        comparison: Measures of the comparison, without gradient.
        logprobs: [M] student logprobs of the targets, without gradient; None without targets.
        entropy: [M] student entropy, without gradient; None without targets.
    """

    weighted: Tensor
    comparison: TokenComparison
    logprobs: Tensor | None
    entropy: Tensor | None


class _HeadArguments(NamedTuple):
    """Arguments of the head that need no gradient."""

    weights: Tensor
    teacher: TeacherTokens
    divergence: LogitDivergence
    targets: Tensor | None
    temperature: float
    chunk: int
    chunks: list[tuple[TokenComparison, Tensor]]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, work: _HeadArguments) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        grad_weight = None
        # Reuse one buffer for all chunks: on a CPU, touching fresh memory costs as much as the arithmetic on it.
        buffer = weight.new_empty(min(work.chunk, len(hidden)), weight.shape[0])
        weighted = []
        for start in range(0, max(1, len(hidden)), work.chunk):
            rows = slice(start, start + work.chunk)
            losses, grad = _one_chunk(hidden[rows], weight, rows, work, buffer)
            weighted.append(losses)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if needs_weight:
                grad_weight = added_product(grad_weight, grad.T, hidden[rows], dtype=exact)
        if grad_hidden is not None and work.divergence.part.num_ranks > 1:
            dist.all_reduce(grad_hidden, group=work.divergence.part.group)
        ctx.grads = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        return torch.cat(weighted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        if ctx.grads is None:
            raise NotReadyError("the chunked head can run backward only once; call it again for another backward pass.")
        grads_of_inputs, ctx.grads = ctx.grads, None
        factor = _common_factor(grad)
        of_hidden, of_weight = (of if of is None or factor is None else of.mul_(factor) for of in grads_of_inputs)
        return of_hidden, of_weight, None


def _common_factor(grad: Tensor) -> Tensor | None:
    """Return the factor that all gradients share; None for 1.

    On a GPU, checking for different factors would synchronize, so they become NaN instead, and the step is skipped.
    """
    if not len(grad):
        return None
    is_common = (grad == grad[0]).all()
    if grad.device.type != "cpu":
        return torch.where(is_common, grad[0], torch.nan)
    if not bool(is_common):
        raise ShapeError(
            "the chunked head returns losses that are already weighted: sum them, and at most scale the sum. Pass "
            "token weights as `weights`."
        )
    return None if float(grad[0]) == 1.0 else grad[0]


def added_product(total: Tensor | None, left: Tensor, right: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Add left @ right to the total in place; None starts a new total in the dtype."""
    if total is None:
        return torch.mm(left, right).to(dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(left @ right)


def _one_chunk(
    hidden: Tensor, weight: Tensor, rows: slice, work: _HeadArguments, buffer: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's weighted losses and their gradient with respect to its logits."""
    logits = torch.mm(hidden, weight.T, out=buffer[: len(hidden)])
    logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    scores = logits.new_empty(2, 0) if work.targets is None else _of_targets(logits, work.targets[rows], work)
    weights = work.weights[rows]
    comparison, grad = work.divergence.with_gradient(logits.detach(), work.teacher.select(rows), weights)
    work.chunks.append((comparison, scores))
    return weights * comparison.losses, grad.to(weight.dtype)


def _of_targets(logits: Tensor, targets: Tensor, work: _HeadArguments) -> Tensor:
    """Return logprobs and entropy [2, M]; a few tokens at a time, since they need several arrays as wide as logits."""
    count = TARGETS_AT_ONCE if logits.device.type == "cpu" else GPU_TARGETS_AT_ONCE
    scores = [
        torch.stack(vocabulary_logprobs(few, ids, temperature=work.temperature, part=work.divergence.part))
        for few, ids in zip(torch.split(logits, count), torch.split(targets, count), strict=True)
    ]
    return torch.cat(scores, dim=1)


@converts_arguments
def chunked_head_divergence(
    hidden: Tensor,
    weight: Tensor,
    *,
    weights: Tensor,
    teacher: TeacherTokens,
    divergence: LogitDivergence,
    targets: Tensor | None = None,
    temperature: float = 1.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> HeadResult:
    """Compute the divergence between `hidden @ weight.T` and the teachers.

    Args:
        hidden: [M, H] the student's last hidden states.
        weight: [V / ranks, H] this rank's vocabulary slice of the student's output matrix.
        weights: [M] weights of the tokens in the loss, without gradient.
        teacher: The teachers' data for the same tokens.
        divergence: Divergence to compute.
        targets: [M] int64 sampled tokens; if set, their logprobs and the entropy are computed too.
        temperature: Temperature of the logprobs and the entropy.
        chunk_logits: Number of logits per chunk.

    Raises:
        DataError: The first column of the teacher's ids differs from `targets`.
        ShapeError: In the backward pass, the losses' gradients differ: the losses were weighted again.
        NotReadyError: In a second backward pass.
    """
    if targets is not None:
        check_sampled_tokens(teacher.ids[:, 0], targets, (teacher.index >= 0) & (teacher.ids[:, 0] >= 0))
    chunk = max(1, chunk_logits // max(1, weight.shape[0]))
    work = _HeadArguments(weights.detach(), teacher, divergence, targets, temperature, chunk, [])
    weighted: Tensor = _ChunkedHead.apply(hidden, weight, work)  # type: ignore[no-untyped-call]
    comparison = TokenComparison.joined(comparison for comparison, _ in work.chunks)
    if targets is None:
        return HeadResult(weighted, comparison, None, None)
    logprobs, entropy = torch.cat([scores for _, scores in work.chunks], dim=1)
    return HeadResult(weighted, comparison, logprobs, entropy)
