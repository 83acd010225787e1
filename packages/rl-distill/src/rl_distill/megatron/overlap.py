"""Overlap data-parallel collectives with computation: gradient reduction and weight gathering.

Megatron reduces the gradients of a bucket of parameters as soon as the backward pass has computed all of them. After a
step of the distributed optimizer, each rank has only the slices that it updated, and a bucket is gathered when the next
forward pass reaches a module with one of its weights. Other code that reads weights must gather them first.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_block import TransformerBlock

from rl_distill.megatron.model_spec import PolicyLayer
from rl_distill.megatron.parallel import group_of_copies
from rl_distill.options import LearnerOptions, ParallelOptions

_MOST_ELEMENTS = 40_000_000
"""Maximum number of elements in a bucket; Megatron's default."""

_FEWEST_BUCKETS = 8
"""Minimum number of buckets, so that gradients of a small policy or adapter do not all wait for the last one."""


def data_parallelism(
    options: LearnerOptions, parallel: ParallelOptions, chunks: Sequence[torch.nn.Module]
) -> DistributedDataParallelConfig:
    """Return how Megatron stores, reduces and shards the trained parameters of a rank's chunks.

    Nothing overlaps if no other rank has the same weights.
    """
    has_copies = any(group_of_copies(of_experts=of_experts).size() > 1 for of_experts in (False, True))
    gathers = has_copies and options.overlap_param_gather
    trained = sum(p.numel() for p in chunks[0].parameters() if p.requires_grad)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=has_copies and options.overlap_grad_reduce,
        overlap_param_gather=gathers,
        # Gather a chunk's weights while the previous chunk computes, not when it is called.
        align_param_gather=gathers and len(chunks) > 1,
        use_distributed_optimizer=parallel.distributed_optimizer,
        bucket_size=max(1, min(_MOST_ELEMENTS, trained // _FEWEST_BUCKETS)),
    )


def connect_schedule(chunks: Sequence[DistributedDataParallel]) -> None:
    """Let Megatron's schedules start overlapped collectives, and the rank's modules wait for their weights."""
    config, ddp = chunks[0].config, chunks[0].ddp_config
    is_virtual = len(chunks) > 1
    if ddp.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if is_virtual else chunks[0].no_sync
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks] if is_virtual else None
    if ddp.overlap_param_gather:
        config.param_sync_func = [partial(_start_gather, chunk) for chunk in chunks] if is_virtual else None
        for chunk in chunks:
            _wait_by_layer(chunk)
            for group in _bucket_groups(chunk):  # all ranks start with the same weights
                group.param_gather_dispatched = True


def gather_weights(chunks: Iterable[Any]) -> None:
    """Gather all weights of the last step on every rank if necessary. Every rank calls it together."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for group in _bucket_groups(chunk):
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)


def mark_stale(chunks: Iterable[Any]) -> None:
    """Let the next forward pass gather the weights, even if no backward pass came before the step that updates them."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            for group in _bucket_groups(chunk):
                group.param_gather_dispatched = False


def _bucket_groups(chunk: DistributedDataParallel) -> Iterator[Any]:
    yield from chunk.bucket_groups
    yield from chunk.expert_parallel_bucket_groups


def _start_gather(chunk: DistributedDataParallel, *_: Any) -> None:
    """Start the gathers of a chunk that have not started since the last step."""
    for group in _bucket_groups(chunk):
        if not group.param_gather_dispatched:
            group.start_param_sync()


def _wait_by_layer(chunk: DistributedDataParallel) -> None:
    """Make each layer wait for all of its weights, and the final norm for those of the head.

    Megatron's modules wait for their weights when called. An adapter's A and B, experts in one autograd node, and a
    head multiplied in chunks are read without such a call.
    """
    in_layers: set[torch.nn.Parameter] = set()
    for module in chunk.modules():
        if isinstance(module, PolicyLayer):
            in_layers.update(module.parameters())
            _wait_before(module, module.parameters(), chunk)
    others = [parameter for parameter in chunk.parameters() if parameter not in in_layers]
    for module in chunk.modules():
        if isinstance(module, TransformerBlock) and module.final_layernorm is not None:
            _wait_before(module.final_layernorm, others, chunk)


def _wait_before(module: torch.nn.Module, parameters: Iterable[torch.nn.Parameter], chunk: Any) -> None:
    of_parameter = chunk.param_to_bucket_group
    groups = list(dict.fromkeys(of_parameter[parameter] for parameter in parameters if parameter in of_parameter))
    leaves_next = chunk.ddp_config.align_param_gather  # the schedule starts the next gathers

    def wait(*_: Any) -> None:
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=leaves_next)

    module.register_forward_pre_hook(wait)
