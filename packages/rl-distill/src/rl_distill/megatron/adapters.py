"""Adapters of one base that train in turn: the state of those that wait is in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_distill.megatron.rank_tensors import RankTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAdapter:
    """An adapter's state on one rank, in host memory.

    Attributes:
        tensors: Copies of `RankTensors.adapter_state`.
        gradients: Copies of the gradients that wait for an optimizer step; empty if none wait.
        losses: Losses of the batches whose gradients wait.
        step: Optimizer steps done so far.
    """

    tensors: Sequence[Tensor]
    gradients: Sequence[Tensor]
    losses: Sequence[float]
    step: int

    @classmethod
    def of_rank(cls, tensors: RankTensors, *, losses: Sequence[float], step: int) -> "KeptAdapter":
        """Copy the adapter in training."""
        with tensors.adam.on_device():
            return cls(
                tensors=[_on_host(tensor) for tensor in tensors.adapter_state()],
                gradients=[_on_host(gradient) for gradient in tensors.adam.gradients()] if losses else [],
                losses=tuple(losses),
                step=step,
            )

    @torch.no_grad()
    def restore(self, tensors: RankTensors) -> None:
        """Continue this adapter in place of the one in training."""
        with tensors.adam.on_device():
            for live, kept in zip(tensors.adapter_state(), self.tensors, strict=True):
                live.copy_(kept)
            tensors.adam.set_step(self.step)
        if self.gradients:
            for live, kept in zip(tensors.adam.gradients(), self.gradients, strict=True):
                live.copy_(kept)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
