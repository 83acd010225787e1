"""Which implementation of each part of a model runs: those of a CPU, or those of a GPU."""

from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_distill.options import KernelChoice


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes.

    Attributes:
        attention: "buckets", one call for each group of segments of nearly equal length; or "varlen", flash attention
            over the whole pack, which takes 16-bit numbers alone.
        experts: "turns", one after the other; or "grouped", in one call.
        is_fused: Norms, gated activations and rotary embeddings by torch's own kernels, compiled where they can be.
        layers: Whose matrices and norms: "torch", or "transformer_engine".
    """

    attention: Literal["buckets", "varlen"] = "buckets"
    experts: Literal["turns", "grouped"] = "turns"
    is_fused: bool = False
    layers: Literal["torch", "transformer_engine"] = "torch"


PLAIN = Kernels()


def chosen_kernels(wanted: KernelChoice, *, device: torch.device, dtype: torch.dtype) -> Kernels:
    """What computes on a device: see `rl_distill.options.LearnerOptions.kernels`.

    Args:
        wanted: The option.
        device: Where the model is.
        dtype: Of its parameters.
    """
    if wanted == "plain" or (wanted == "auto" and device.type == "cpu"):
        return PLAIN
    return Kernels(
        attention="buckets" if dtype == torch.float32 and device.type != "cpu" else "varlen",
        experts="grouped",
        is_fused=True,
        layers="transformer_engine" if wanted == "transformer_engine" else "torch",
    )


@dataclass
class PolicyTransformerConfig(TransformerConfig):  # type: ignore[misc]
    """megatron's configuration, which reaches every module of a model, with what computes.

    Attributes:
        kernels: What computes.
    """

    kernels: Kernels = PLAIN
