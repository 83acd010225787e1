"""A process becomes a rank: torch.distributed and megatron's process groups."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which of the learner's processes this is.

    Attributes:
        rank: From 0.
        world_size: Number of processes.
    """

    rank: int = 0
    world_size: int = 1


def learner_device() -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def undisturbed_random_numbers() -> AbstractContextManager[None]:
    """Put the generators of the CPU and of this process's GPU back on leaving."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices)


def initialize_rank(rank: Rank, *, seed: int) -> None:
    """Make megatron's process groups, once in a process; random numbers of others stay as they were.

    A single process talks to nobody and opens no port. Where an engine in this process has already set up
    torch.distributed for itself alone, that is used.

    Args:
        rank: This process.
        seed: Of megatron's random number trackers.

    Raises:
        SettingsError: The world size is not 1, or torch.distributed has another one.
    """
    if rank.world_size != 1:
        raise SettingsError(f"the Megatron learner runs at world size 1; found {rank.world_size}.")
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size)
    if dist.get_world_size() != rank.world_size:
        raise SettingsError(
            f"torch.distributed is set up for {dist.get_world_size()} processes here, the learner for "
            f"{rank.world_size}; run the learner in a process of its own."
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
        with undisturbed_random_numbers():
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
