"""Collectives of the data-parallel ranks beside the passes that need them: sums of gradients, gathers of weights.

megatron sums the gradients of a bucket of parameters as soon as the backward pass has made all of them. After a step of
the distributed optimizer it leaves each rank with the stretches that it has updated, and gathers a bucket when the next
forward pass comes to a module that holds one of its weights. Other readers of the weights gather them first.
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
"""Of a bucket: megatron's default."""

_FEWEST_BUCKETS = 8
"""So that the gradients of a small policy, or of an adapter, do not all wait for the last of them."""


def data_parallelism(
    options: LearnerOptions, parallel: ParallelOptions, chunks: Sequence[torch.nn.Module]
) -> DistributedDataParallelConfig:
    """How megatron keeps, sums and shares what the chunks of a rank train.

    Ranks without another that has the same weights overlap nothing.
    """
    has_copies = any(group_of_copies(of_experts=of_experts).size() > 1 for of_experts in (False, True))
    gathers = has_copies and options.overlap_param_gather
    trained = sum(p.numel() for p in chunks[0].parameters() if p.requires_grad)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=has_copies and options.overlap_grad_reduce,
        overlap_param_gather=gathers,
        # A chunk's weights are gathered while the chunk before it computes, not when it is called.
        align_param_gather=gathers and len(chunks) > 1,
        use_distributed_optimizer=parallel.distributed_optimizer,
        bucket_size=max(1, min(_MOST_ELEMENTS, trained // _FEWEST_BUCKETS)),
    )


def connect_schedule(chunks: Sequence[DistributedDataParallel]) -> None:
    """Let megatron's schedules start what overlaps, and the modules of a rank wait for their weights."""
    config, ddp = chunks[0].config, chunks[0].ddp_config
    is_virtual = len(chunks) > 1
    if ddp.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if is_virtual else chunks[0].no_sync
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks] if is_virtual else None
    if ddp.overlap_param_gather:
        config.param_sync_func = [partial(_start_gather, chunk) for chunk in chunks] if is_virtual else None
        for chunk in chunks:
            _wait_by_layer(chunk)
            for group in _bucket_groups(chunk):  # every rank has built the same weights
                group.param_gather_dispatched = True


def gather_weights(chunks: Iterable[Any]) -> None:
    """Have all weights of the last step on every rank; nothing where they are there. Every rank calls it together."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for group in _bucket_groups(chunk):
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)


def _bucket_groups(chunk: DistributedDataParallel) -> Iterator[Any]:
    yield from chunk.bucket_groups
    yield from chunk.expert_parallel_bucket_groups


def _start_gather(chunk: DistributedDataParallel, *_: Any) -> None:
    """Start the gathers of a chunk that nothing has started since the last step."""
    for group in _bucket_groups(chunk):
        if not group.param_gather_dispatched:
            group.start_param_sync()


def _wait_by_layer(chunk: DistributedDataParallel) -> None:
    """Let each layer wait for all of its weights, and the last norm for those of the head.

    megatron's own modules wait for theirs when they are called. An adapter's A and B, experts in one node of autograd,
    and a head that is multiplied in chunks are read without a call.
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
    leaves_next = chunk.ddp_config.align_param_gather  # the schedule starts them

    def wait(*_: Any) -> None:
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=leaves_next)

    module.register_forward_pre_hook(wait)
