"""Which implementation of each part of a model runs: those of a CPU, or those of a GPU."""

from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_core.errors import SettingsError
from rl_distill.megatron.attention.varlen import has_cpu_kernels, has_gpu_kernels
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


def chosen_kernels(wanted: KernelChoice, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """What computes on a device: see `rl_distill.options.LearnerOptions.kernels`.

    Args:
        wanted: The option.
        device: Where the model is.
        dtype: Of its parameters.
        head_dim: Channels of its attention's heads.

    Raises:
        SettingsError: A CPU has no kernels for what is wanted.
    """
    if wanted == "plain" or (wanted == "auto" and device.type == "cpu"):
        return PLAIN
    if wanted == "transformer_engine" and device.type == "cpu":
        raise SettingsError(
            'learner.kernels = "transformer_engine" needs a GPU; this learner is on a CPU. Set learner.kernels = '
            '"auto", which uses what the device has.'
        )
    return Kernels(
        attention=_attention(device=device, dtype=dtype, head_dim=head_dim),
        experts="grouped",
        is_fused=True,
        layers="transformer_engine" if wanted == "transformer_engine" else "torch",
    )


def _attention(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> Literal["buckets", "varlen"]:
    """Flash attention where there are kernels of it."""
    if device.type != "cpu":
        return "varlen" if has_gpu_kernels(device, dtype=dtype, head_dim=head_dim) else "buckets"
    if not has_cpu_kernels():
        raise SettingsError(
            'learner.kernels = "fused" needs a GPU, as torch has flash attention only there; this learner is on a CPU. '
            'Set learner.kernels = "auto", which uses what the device has.'
        )
    return "varlen"


@dataclass
class PolicyTransformerConfig(TransformerConfig):  # type: ignore[misc]
    """megatron's configuration, which reaches every module of a model, with what computes.

    Attributes:
        kernels: What computes.
    """

    kernels: Kernels = PLAIN
