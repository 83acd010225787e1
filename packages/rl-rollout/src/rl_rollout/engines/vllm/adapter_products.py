"""Products with an adapter on CPUs.

vLLM copies A and B once per token of a step, to multiply each token with its own copy. With one adapter, two matrix
products suffice.
"""

from types import MethodType
from typing import Any

import torch

from rl_rollout.engines.vllm.adapter_slot import SLOT


def multiply_at_once(runner: Any) -> None:
    """Make the wrapped layers of a worker's model runner multiply with `add_adapter`."""
    for wrapper in runner.lora_manager._adapter_manager.punica_wrapper_mapping.values():
        wrapper.add_lora_linear = MethodType(add_adapter, wrapper)


def add_adapter(
    wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Replace `PunicaWrapperCPU.add_lora_linear` for the only adapter that has a slot.

    Args:
        wrapper: vLLM's wrapper, which knows the slot of each token.
        y: [tokens, out]. scale * x @ A.T @ B.T is added in place, for tokens with the adapter.
        x: [tokens, in].
        lora_a_stacked: [slots, 1, rank, in] for each part of the output.
        lora_b_stacked: [slots, 1, part, rank].
        scale: Factor of the product.
        output_slices: Sizes of the output's parts.
    """
    if wrapper.no_lora:
        return
    slots = wrapper.token_lora_indices
    has_adapter = None if wrapper.batch_size == 1 else (slots == SLOT).to(x.dtype).unsqueeze(-1)
    start = 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        low = x @ a[SLOT, 0].T
        if has_adapter is not None:
            low *= has_adapter
        y[:, start : start + size].addmm_(low, b[SLOT, 0].T, alpha=scale)
        start += size
