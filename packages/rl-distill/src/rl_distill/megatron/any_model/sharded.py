"""Weights, gradients and moments divided over the data-parallel ranks: torch's FSDP2 around transformers' model.

Each rank keeps rows of every trained parameter in float32. The weights of a layer are gathered in the dtype of the
computation when it is called, forward and backward. Its gradients are summed in float32, each rank keeping its rows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn import Parameter

from rl_core.errors import SettingsError
from rl_distill.megatron.any_model.chunk import TransformersModel
from rl_distill.megatron.convert import held_rows
from rl_distill.megatron.optimizer import Main, RankAdam, sum_of_squares
from rl_distill.megatron.parallel import group_of_copies


def shard_model(model: TransformersModel, dtype: torch.dtype, *, device: torch.device) -> None:
    """Divide a model over the data-parallel ranks, layer by layer. Parameters that do not train stay whole.

    Args:
        model: The model in host memory.
        dtype: Dtype of the computation.
        device: Device of the shards.

    Raises:
        SettingsError: This torch is too old.
    """
    if not (hasattr(FSDPModule, "set_reduce_scatter_unused_params") and hasattr(FSDPModule, "reset_iter_state")):
        raise SettingsError(f"shard_weights needs torch 2.13 or newer; found {torch.__version__}.")
    whole = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    group = model.calls_group = group_of_copies(of_experts=False)
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(group, device.type),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "ignored_params": whole,
    }
    for module in (*model.layers(), model):
        sharded = fully_shard(module, **options)
        sharded.set_gradient_divide_factor(1.0)  # `loss_weights` already normalizes over the global batch
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction with a factor
        sharded.set_reduce_scatter_unused_params(True)  # ranks may use different parameters
    without_pack = TransformersModel._find_layers, TransformersModel._own_results, TransformersModel._find_head_scale
    for method in without_pack:
        register_fsdp_forward_method(model, method.__name__)


def drop_gathered(chunks: Iterable[Any]) -> None:
    """Free the weights outside the layers that a forward pass gathered. The next one gathers them again."""
    for chunk in chunks:
        if isinstance(chunk, FSDPModule):
            chunk.reshard()


class ShardedAdam(RankAdam):
    """torch's AdamW over a rank's rows of the parameters."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Build the optimizer of models that `shard_model` divided."""
        trained = {n: p for chunk in chunks for n, p in chunk.named_parameters() if p.requires_grad}
        self._rows = {parameter: Parameter(held_rows(parameter.detach())) for parameter in trained.values()}
        decayed: list[Parameter] = []
        others: list[Parameter] = []
        for name, parameter in trained.items():
            is_exempt = parameter.ndim == 1 or name.endswith(".bias")  # as in Megatron
            (others if is_exempt else decayed).append(self._rows[parameter])
        groups = [{"params": decayed, "wd_mult": 1.0}, {"params": others, "wd_mult": 0.0}]
        self._adam = torch.optim.AdamW(groups, fused=True)
        super().__init__({p: Main(rows, self._adam, 0, is_shared=False) for p, rows in self._rows.items()})

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter, rows in self._rows.items():
            parameter.grad = rows.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's rows; zeros where none were computed."""
        gradients = []
        for parameter in self._rows:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(held_rows(parameter.grad))
        return gradients

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Return the global norm of the summed gradients, and prepare them for `step`."""
        grads = self.gradients()
        for rows, gradient in zip(self._rows.values(), grads, strict=True):
            rows.grad = gradient
        device = next(iter(self._rows)).device
        return math.sqrt(sum_of_squares(grads, group=group_of_copies(of_experts=False), device=device).item())

    def inner(self) -> Iterator[torch.optim.Optimizer]:
        """Yield torch's optimizer."""
        yield self._adam

    def _apply(self) -> None:
        """Update the weights by the prepared gradients."""
        self._adam.step()
