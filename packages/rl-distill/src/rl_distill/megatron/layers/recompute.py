"""Activations of parts of a layer that are made again in the backward pass."""

from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from torch import Tensor


def forget_between(norm: torch.nn.Module, reader: torch.nn.Module) -> None:
    """Let a training step forget what a norm gave as soon as its one reader has it, until the reader's backward pass.

    Args:
        norm: Whose output is made again from its input.
        reader: A module that gives a tuple; what it computes first keeps the norm's output for the backward pass.
    """
    compute = norm.forward
    made: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return compute(x)  # type: ignore[no-any-return]
        made.append(CheckpointWithoutOutput(fp8=None))  # by megatron's default it asks Transformer Engine
        return made[-1].checkpoint(compute, x)  # type: ignore[no-any-return]

    def forget(_reader: Any, _inputs: Any, outputs: tuple[Tensor, Any]) -> None:
        if made:
            made.pop().discard_output_and_register_recompute(outputs[0])

    norm.forward = forward
    reader.register_forward_hook(forget)
