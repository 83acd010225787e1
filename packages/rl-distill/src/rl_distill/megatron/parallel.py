"""Make a process a rank: set up torch.distributed and Megatron's process groups."""

import os
import socket
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from rl_core.devices import own_device
from rl_core.errors import SettingsError
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.megatron.convert import Shard
from rl_distill.options import ParallelOptions

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Collectives that take longer fail on every waiting rank."""

_STORE: dict[str, Any] = {"timeout": COLLECTIVE_TIMEOUT, "wait_for_workers": False, "use_libuv": True}


Rendezvous = tuple[str, int]
"""Rendezvous of a learner's ranks: rank 0's host as seen by the others, and the port of its store."""


def undisturbed_random_numbers() -> AbstractContextManager[None]:
    """Restore the generators of the CPU and of this process's GPU on exit."""
    device = own_device()
    return torch.random.fork_rng(() if device.type == "cpu" else (device,), device_type=device.type)


def open_store(address: str, *, num_ranks: int) -> tuple[Rendezvous, Store]:
    """Open rank 0's store on one address and a free port; return its rendezvous and the store."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(max(16, num_ranks))
    port: int = listener.getsockname()[1]
    store = TCPStore(address, port, num_ranks, is_master=True, master_listen_fd=listener.detach(), **_STORE)
    return (address, port), store


def join_ranks(rank: int, num_ranks: int, *, rendezvous: Rendezvous | None, store: Store | None) -> None:
    """Initialize torch.distributed in this process once.

    A single process needs no network, so gloo's port is opened on loopback. A torch.distributed that an engine in this
    process initialized for one process is reused.

    Args:
        rank: Rank of this process, from 0.
        num_ranks: Number of ranks.
        rendezvous: Rendezvous of the ranks; None for a single rank.
        store: Store opened on rank 0; None elsewhere.

    Raises:
        SettingsError: torch.distributed is already initialized for another number of processes.
    """
    if not dist.is_initialized():
        kind = own_device().type
        backend = "gloo" if kind == "cpu" else f"{kind}:{dist.get_default_backend_for_device(kind)},cpu:gloo"
        if rendezvous is None:
            store = HashStore()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        else:
            _use_interface_of(rendezvous[0])
            store = TCPStore(*rendezvous, num_ranks, is_master=False, **_STORE) if store is None else store
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT)
    if dist.get_world_size() != num_ranks:
        raise SettingsError(
            f"torch.distributed must be initialized for the learner's {num_ranks} processes; found "
            f"{dist.get_world_size()}. Run the learner in a separate process."
        )


def _use_interface_of(address: str) -> None:
    """Keep gloo and NCCL on loopback if the ranks meet there."""
    if address.startswith("127.") or address == "::1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def megatron_sizes(parallel: ParallelOptions) -> dict[str, int | None]:
    """Return the sizes of a layout by Megatron's names."""
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def initialize_groups(parallel: ParallelOptions, *, seed: int) -> None:
    """Create Megatron's process groups once per process, without changing the random state of other code.

    Args:
        parallel: Parallel layout of the ranks.
        seed: Seed of Megatron's random number trackers.

    Raises:
        SettingsError: The process already has the groups of another layout.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**megatron_sizes(parallel), create_gloo_process_groups=False)
        with undisturbed_random_numbers():
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
    found = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }
    wanted = {name: getattr(parallel, name) for name in found}
    if found != wanted:
        raise SettingsError(f"this process already has Megatron's groups for {found}; requested {wanted}.")


class RankPosition(NamedTuple):
    """Position of a rank in the parallel layout.

    Attributes:
        data: Index of its data-parallel share of the rows.
        answers: True on the one rank of each share that reports results.
        has_gpu: True if the rank has a GPU.
    """

    data: int
    answers: bool
    has_gpu: bool

    @classmethod
    def of_this_rank(cls) -> "RankPosition":
        """Read this rank's position from Megatron's groups."""
        is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        others = (parallel_state.get_context_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
        is_first = others == (0, 0)
        return cls(parallel_state.get_data_parallel_rank(), is_last_stage and is_first, own_device().type != "cpu")


def group_of_copies(*, of_experts: bool) -> dist.ProcessGroup:
    """Return the group of ranks with the same parameters, or with the same experts, as this one."""
    group: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group()
        if of_experts
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return group


def shards_of_this_rank(config: PolicyConfig, parallel: ParallelOptions) -> list[Shard]:
    """Return this rank's shards of a policy, one per model chunk."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    num_chunks = parallel.pipeline * parallel.virtual_pipeline
    size = config.num_layers // num_chunks
    shards = []
    for virtual in range(parallel.virtual_pipeline):
        chunk = virtual * parallel.pipeline + stage
        shards.append(
            Shard(
                layers=range(chunk * size, (chunk + 1) * size),
                has_embedding=chunk == 0,
                has_head=chunk == num_chunks - 1,
                tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
                tensor_size=parallel.tensor,
                expert_rank=parallel_state.get_expert_model_parallel_rank(),
                expert_size=parallel.expert,
                expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
                expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
            )
        )
    return shards
