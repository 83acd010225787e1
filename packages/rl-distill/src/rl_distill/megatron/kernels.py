"""Select the implementation of each part of a model for CPU or GPU."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_core.errors import SettingsError
from rl_distill.megatron.attention.varlen import has_cpu_kernels, has_gpu_kernels
from rl_distill.megatron.layers import RMSNorm
from rl_distill.options import KernelChoice


@dataclass(frozen=True, slots=True)
class Kernels:
    """Implementation of each part of a model.

    Attributes:
        attention: "buckets" calls attention once per group of segments of similar length. "varlen" is flash attention
            over the whole pack, which needs 16-bit dtypes on a GPU.
        experts: "turns" computes experts one after another; "grouped" computes all in one call.
        is_fused: True to use torch's kernels for norms, gated activations and rotary embeddings, compiled where
            possible.
        layers: Library of the linear layers and norms.
    """

    attention: Literal["buckets", "varlen"] = "buckets"
    experts: Literal["turns", "grouped"] = "turns"
    is_fused: bool = False
    layers: Literal["torch", "transformer_engine"] = "torch"


PLAIN = Kernels()


def chosen_kernels(wanted: KernelChoice, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """Select the kernels for a device; see `rl_distill.options.LearnerOptions.kernels`.

    Args:
        wanted: The requested kernels.
        device: Device of the model.
        dtype: Dtype of the parameters.
        head_dim: Channels per attention head.

    Raises:
        SettingsError: The requested kernels are not available on a CPU.
    """
    if wanted == "plain" or (wanted == "auto" and device.type == "cpu"):
        return PLAIN
    if wanted == "transformer_engine" and device.type == "cpu":
        raise SettingsError(
            'optimizer.kernels = "transformer_engine" needs a GPU; found a CPU. Set optimizer.kernels = "auto" to use '
            "the device's kernels."
        )
    if device.type == "cpu" and not has_cpu_kernels():
        raise SettingsError(
            'optimizer.kernels = "fused" needs a GPU, because torch has flash attention only there; found a CPU. '
            'Set optimizer.kernels = "auto" to use the kernels of the device.'
        )
    has_flash = device.type == "cpu" or has_gpu_kernels(device, dtype=dtype, head_dim=head_dim)
    return Kernels(
        attention="varlen" if has_flash else "buckets",
        experts="grouped",
        is_fused=True,
        layers="transformer_engine" if wanted == "transformer_engine" else "torch",
    )


@dataclass
class PolicyTransformerConfig(TransformerConfig):  # type: ignore[misc]
    """Megatron's model configuration with the kernel selection, which reaches every module.

    Attributes:
        kernels: Implementation of each part of the model.
    """

    kernels: Kernels = PLAIN


class Layers(NamedTuple):
    """Classes for Megatron's layer specifications. Each has a `weight`, and linear layers may have a `bias`.

    Attributes:
        column: Linear layer split by rows over tensor ranks.
        row: Linear layer split by columns over tensor ranks.
        norm: RMS norm.
    """

    column: Any = ColumnParallelLinear
    row: Any = RowParallelLinear
    norm: Any = RMSNorm


def layers_of(kernels: Kernels) -> Layers:
    """Return the classes that `Kernels.layers` names.

    Raises:
        SettingsError: Transformer Engine cannot be imported.
    """
    if kernels.layers == "torch":
        return Layers()
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        raise SettingsError(
            'optimizer.kernels = "transformer_engine" needs the modules transformer_engine and '
            "transformer_engine.pytorch, which cannot be imported. Install `transformer-engine[pytorch]` for this "
            'torch and CUDA, or set optimizer.kernels = "fused". `python -c "import transformer_engine.pytorch"` shows '
            "the reason."
        )
    return Layers(te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm)
