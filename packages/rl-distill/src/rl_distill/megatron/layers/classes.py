"""Select the classes of linear layers and norms: torch's, or Transformer Engine's behind Megatron's interface."""

from typing import Any, NamedTuple

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from rl_core.errors import SettingsError
from rl_distill.megatron.kernels import Kernels
from rl_distill.megatron.layers.norm import RMSNorm


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
