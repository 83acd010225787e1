"""Whose matrices and norms a model is built of: torch's, or those of Transformer Engine behind megatron's classes."""

from typing import Any, NamedTuple

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from rl_core.errors import SettingsError
from rl_distill.megatron.kernels import Kernels
from rl_distill.megatron.layers.norm import RMSNorm


class Layers(NamedTuple):
    """Classes that megatron's specifications name; each has a `weight`, and matrices may have a `bias`.

    Attributes:
        column: A matrix cut by its rows over tensor ranks.
        row: A matrix cut by its columns.
        norm: Root mean square norm.
    """

    column: Any = ColumnParallelLinear
    row: Any = RowParallelLinear
    norm: Any = RMSNorm


def layers_of(kernels: Kernels) -> Layers:
    """What `Kernels.layers` names.

    Raises:
        SettingsError: Transformer Engine cannot be imported.
    """
    if kernels.layers == "torch":
        return Layers()
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        raise SettingsError(
            'learner.kernels = "transformer_engine" needs the modules transformer_engine and '
            "transformer_engine.pytorch; they cannot be imported here. Install `transformer-engine[pytorch]` for this "
            'torch and CUDA, or set learner.kernels = "fused". `python -c "import transformer_engine.pytorch"` shows '
            "the reason."
        )
    return Layers(te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm)
