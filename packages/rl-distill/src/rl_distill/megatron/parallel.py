"""A process becomes a rank: torch.distributed and megatron's process groups."""

import os
import socket
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from rl_core.errors import SettingsError
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.megatron.convert import Shard
from rl_distill.options import ParallelOptions

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A collective that takes longer fails on every rank that waits in it."""


Rendezvous = tuple[str, int]
"""Where the ranks of a learner meet: the host of rank 0, as the others reach it, and the port of its store."""


def learner_device() -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def undisturbed_random_numbers() -> AbstractContextManager[None]:
    """Put the generators of the CPU and of this process's GPU back on leaving."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices)


def open_store(address: str, *, num_ranks: int) -> tuple[Rendezvous, Store]:
    """Rank 0's store, listening on one address alone and a port of the system's choice; and where that is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(max(16, num_ranks))
    port: int = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        num_ranks,
        is_master=True,
        timeout=COLLECTIVE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return (address, port), store


def join_ranks(rank: int, num_ranks: int, *, rendezvous: Rendezvous | None, store: Store | None) -> None:
    """Make this process a rank of torch.distributed, once.

    A single process talks to nobody: gloo's port, which it opens all the same, is on loopback. Where an engine in this
    process has already set up torch.distributed for itself alone, that is used.

    Args:
        rank: From 0.
        num_ranks: Number of processes.
        rendezvous: Where they meet; None for a single one.
        store: Rank 0's own.

    Raises:
        SettingsError: torch.distributed is set up here for another number of processes.
    """
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
        if rendezvous is None:
            store = HashStore()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        else:
            _use_interface_of(rendezvous[0])
            store = _client_store(rendezvous, num_ranks) if store is None else store
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT)
    if dist.get_world_size() != num_ranks:
        raise SettingsError(
            f"torch.distributed is set up for {dist.get_world_size()} processes here, the learner for {num_ranks}; "
            "run the learner in a process of its own."
        )


def _client_store(rendezvous: Rendezvous, num_ranks: int) -> Store:
    return TCPStore(
        *rendezvous,
        num_ranks,
        is_master=False,
        timeout=COLLECTIVE_TIMEOUT,
        wait_for_workers=False,
        use_libuv=True,
    )


def _use_interface_of(address: str) -> None:
    """Ranks that meet on loopback open no other interface."""
    if address.startswith("127.") or address == "::1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def initialize_groups(parallel: ParallelOptions, *, seed: int) -> None:
    """Make megatron's process groups, once in a process; random numbers of others stay as they were.

    Args:
        parallel: The layout.
        seed: Of megatron's random number trackers.

    Raises:
        SettingsError: The process has groups of another layout.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            create_gloo_process_groups=False,
        )
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
        raise SettingsError(f"this process has megatron's groups for {found} already; found {wanted}.")


class Place(NamedTuple):
    """Which part of the learner's work this rank does.

    Attributes:
        data: Which share of the rows.
        answers: True on the one rank of each data-parallel share that says what came out.
        has_gpu: Where it computes.
    """

    data: int
    answers: bool
    has_gpu: bool

    @classmethod
    def of_this_rank(cls) -> "Place":
        """Ask megatron's groups."""
        is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        others = (parallel_state.get_context_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
        is_first = others == (0, 0)
        return cls(parallel_state.get_data_parallel_rank(), is_last_stage and is_first, torch.cuda.is_available())


def group_of_copies(*, of_experts: bool) -> dist.ProcessGroup:
    """The ranks with the same parameters, or with the same experts, as this one."""
    group: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group()
        if of_experts
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return group


def shards_of_this_rank(config: PolicyConfig, parallel: ParallelOptions) -> list[Shard]:
    """What this rank holds of a policy: one shard for each of its model chunks."""
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
