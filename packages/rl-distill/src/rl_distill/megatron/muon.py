"""Muon for hidden matrices: momentum, orthogonalized by Newton-Schulz iterations. Adam trains the other tensors.

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. Liu et al. 2025, arXiv:2502.16982: updates are
scaled to the size of Adam's, so that one learning rate and one weight decay serve both.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_distill.megatron.convert import TensorBlock
from rl_distill.options import AdamOptions

MOMENTUM = 0.95
COEFFICIENTS, NUM_ITERATIONS = (3.4445, -4.775, 2.0315), 5
"""The post's polynomial, which brings singular values near 1 quickly, but not exactly to 1."""
UPDATE_SCALE = 0.2
"""Root mean square of an update's entries, about that of Adam."""
SMALLEST_NORM = 1e-7


class HiddenMatrices(NamedTuple):
    """A parameter that consists of hidden matrices, such as the fused queries, keys and values of a layer.

    Attributes:
        tensor: Float32 tensor that the optimizer updates, with its gradient.
        optimizer: Torch optimizer that has its state.
        blocks: Returns the matrices in a tensor of the parameter's shape.
    """

    tensor: Tensor
    optimizer: torch.optim.Optimizer
    blocks: Callable[[Tensor], list[TensorBlock]]


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return a matrix [M, N] with the same singular vectors, and singular values near 1 (0.7 to 1.2)."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.to(matrix.dtype if matrix.device.type == "cpu" else torch.bfloat16)
    found = found.t() if is_tall else found
    found = found / found.norm().clamp_min(SMALLEST_NORM)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.t()
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), found, beta=linear)
    return (found.t() if is_tall else found).to(matrix.dtype)


@torch.no_grad()
def muon_step(matrices: Sequence[HiddenMatrices], options: AdamOptions) -> None:
    """Update the hidden matrices, and drop their gradients, so that Adam passes over them.

    Args:
        matrices: A rank's hidden matrices; ranks that share a matrix call this with the same ones.
        options: Settings of the step: learning rate and weight decay.
    """
    for tensor, optimizer, blocks in matrices:
        if tensor.grad is None:
            continue
        state = optimizer.state[tensor]
        if not state:
            state.update(step=torch.zeros((), device=tensor.device), exp_avg=torch.zeros_like(tensor))
        state["step"] += 1
        momentum = state["exp_avg"].lerp_(tensor.grad, 1.0 - MOMENTUM)
        update = tensor.grad.lerp(momentum, MOMENTUM)  # Nesterov's
        for block in blocks(update):
            block.write(_own_update(block))
        tensor.mul_(1.0 - options.learning_rate * options.weight_decay).add_(update, alpha=-options.learning_rate)
        tensor.grad = None


def _own_update(block: TensorBlock) -> Tensor:
    """Return this rank's rectangle of the update of a matrix, which tensor-parallel ranks may share."""
    own, scale = block.read(), UPDATE_SCALE * math.sqrt(max(block.shape))
    if block.sizes == block.shape:
        return orthogonalized(own) * scale
    axis = 0 if block.sizes[0] < block.shape[0] else 1
    experts, others = parallel_state.get_expert_tensor_parallel_group, parallel_state.get_tensor_model_parallel_group
    group = experts() if block.is_expert else others()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return orthogonalized(torch.cat(parts, axis)).narrow(axis, block.offsets[axis], block.sizes[axis]) * scale
