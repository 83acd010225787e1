"""Recompute a norm's output in the backward pass."""

from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from torch import Tensor


def forget_between(norm: torch.nn.Module, reader: torch.nn.Module) -> None:
    """Free a norm's output once its only reader has used it, and recompute it in the reader's backward pass.

    Args:
        norm: Norm whose output is recomputed from its input.
        reader: Module that returns a tuple. Its first operation saves the norm's output for the backward pass.
    """
    compute = norm.forward
    made: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return compute(x)  # type: ignore[no-any-return]
        made.append(CheckpointWithoutOutput(fp8=None))  # Megatron's default needs Transformer Engine
        return made[-1].checkpoint(compute, x)  # type: ignore[no-any-return]

    def forget(_reader: Any, _inputs: Any, outputs: tuple[Tensor, Any]) -> None:
        if made:
            made.pop().discard_output_and_register_recompute(outputs[0])

    norm.forward = forward
    reader.register_forward_hook(forget)
