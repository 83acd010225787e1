"""Supervised learning on the tokens of `loss_mask`."""

import torch

from rl_distill.learner import MetricSums, MicroBatch


def supervised_objective(
    policy_logprobs: torch.Tensor,
    entropy: torch.Tensor | None,  # noqa: ARG001 - every objective has this signature
    micro_batch: MicroBatch,
) -> tuple[torch.Tensor, MetricSums]:
    """Return the cross entropy weighted by `loss_weights`.

    Args:
        policy_logprobs: [T] natural-log probabilities of the tokens.
        entropy: Unused.
        micro_batch: Needs the columns loss_weights [T] and loss_mask [T].

    Returns:
        The loss, and the metric sums of `nll` (mean over trained tokens, natural log).
    """
    mask = micro_batch.columns["loss_mask"]
    losses = torch.where(mask, -policy_logprobs, 0.0)
    loss = (losses * micro_batch.columns["loss_weights"]).sum()
    return loss, {"nll": (losses.detach().sum(), mask.sum())}
