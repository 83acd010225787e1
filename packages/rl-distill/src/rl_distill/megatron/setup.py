"""Build a policy on this rank: model, weights, and megatron's data parallelism around it."""

import warnings
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from rl_core.errors import DataError
from rl_distill.checkpoint import PolicySource
from rl_distill.hf_folder import read_policy_tensors
from rl_distill.megatron.convert import Shard, to_megatron
from rl_distill.megatron.model import PolicyModel
from rl_distill.megatron.model_spec import transformer_config
from rl_distill.megatron.parallel import undisturbed_random_numbers


def build_policy(source: PolicySource, shard: Shard, *, dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    """A policy's model on this rank, with its weights, wrapped for data parallelism.

    Args:
        source: Where weights and configuration come from.
        shard: This rank's part.
        dtype: Of the parameters.
        seed: Of random weights; others' random numbers stay as they were.
        device: Where the model goes.

    Returns:
        megatron's DistributedDataParallel around a PolicyModel.

    Raises:
        DataError: A file or tensor is missing, torn or of another shape.
    """
    state = None
    if source.policy_dir is not None:
        tensors = read_policy_tensors(source.policy_dir, source.config, dtype=dtype)
        state = to_megatron(tensors, source.config, shard)
    config = transformer_config(source.config, dtype=dtype, init_method=None if state is None else _keep)
    with undisturbed_random_numbers(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # megatron's, about its own calls of itself
        torch.manual_seed(seed)
        model = PolicyModel(source.config, config)
    if state is not None:
        _load(model, state)
    model = model.to(device)
    if dtype != torch.float32:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, ddp, model)


def _keep(tensor: Tensor) -> Tensor:
    """Leave a weight as it is, because it is loaded next."""
    return tensor


def _load(model: torch.nn.Module, state: dict[str, Tensor]) -> None:
    found = model.load_state_dict(state, strict=False)
    missing = [name for name in found.missing_keys if not name.endswith("_extra_state")]
    if missing or found.unexpected_keys:
        raise DataError(f"weights and model do not fit: missing {missing[:3]}, unexpected {found.unexpected_keys[:3]}.")
