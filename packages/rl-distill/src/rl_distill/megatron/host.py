"""The role of a learner's rank: connects to the other ranks, holds models by name, and runs their methods.

All ranks of a learner receive the same calls in the same order unless a docstring says otherwise.
"""

import asyncio
import ipaddress
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from rl_core.cluster import RoleContext
from rl_core.devices import own_device
from rl_core.errors import CheckpointError, NotReadyError
from rl_core.gpus import GpuUse, own_gpu_use
from rl_core.weights.broadcast import RankOffer, SenderOptions
from rl_distill.background import in_daemon_thread
from rl_distill.checkpoints.pieces import Piece, StoredPiece, TensorFolder, write_pieces
from rl_distill.megatron.cpu import install_cpu_compatibility
from rl_distill.megatron.parallel import (
    RankPosition,
    Rendezvous,
    initialize_groups,
    join_ranks,
    open_store,
)
from rl_distill.megatron.rank_model import RankModel
from rl_distill.megatron.rank_tensors import Exported, States
from rl_distill.megatron.rank_trainer import RankTrainer
from rl_distill.megatron.setup import ModelPlan
from rl_distill.options import ParallelOptions


class RankHost:
    """One rank of a learner and its models."""

    def __init__(self, parallel: ParallelOptions, *, num_threads: int | None, seed: int, context: RoleContext) -> None:
        """Prepare the process; `join` makes it a rank.

        Args:
            parallel: Parallel layout of the ranks.
            num_threads: Threads of a CPU rank; None leaves torch's setting.
            seed: Seed of Megatron's random number trackers.
            context: Rank number and address of this process.
        """
        self._parallel, self._seed, self._context = parallel, seed, context
        self._models: dict[str, RankModel] = {}
        self._savings: dict[Path, Future[list[StoredPiece]]] = {}
        self._read: dict[str, States] = {}
        self._store: Store | None = None
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if context.size > 1 and own_device().type != "cpu":
            num_visible = torch.accelerator.device_count()
            torch.accelerator.set_device_index(context.rank % num_visible)
        install_cpu_compatibility()

    def check_alive(self) -> None:
        """Return, which shows that the rank is alive."""

    def gpu_use(self) -> list[GpuUse]:
        """Return the use of this rank's GPU since the last call; empty on a CPU."""
        return own_gpu_use("learner")

    def listen(self) -> Rendezvous:
        """Open the store where the ranks meet. Called on rank 0 only."""
        rendezvous, self._store = open_store(self._context.address, num_ranks=self._context.size)
        return rendezvous

    def join(self, rendezvous: Rendezvous | None) -> RankPosition:
        """Connect to the other ranks and create Megatron's process groups."""
        join_ranks(self._context.rank, self._context.size, rendezvous=rendezvous, store=self._store)
        initialize_groups(self._parallel, seed=self._seed)
        return RankPosition.of_this_rank()

    def build(self, name: str, plan: ModelPlan) -> tuple[int, bool]:
        """Build this rank's part of a model.

        Returns:
            Number of the model's parameters whose primary copy is on this rank (the sum over ranks is the total), and
            whether the attention can share prefixes.
        """
        model = self._models[name] = RankTrainer(plan) if plan.trains else RankModel(plan)
        return model.tensors.num_parameters(), model.shares_prefixes

    def run(self, name: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of a model on this rank."""
        return getattr(self._loaded(name), method)(*args, **kwargs)

    def export(self, name: str, what: Exported, *, on_host: bool) -> list[Piece]:
        """Return the tensors whose primary copy is on this rank; see `RankTensors.export`."""
        return self._loaded(name).tensors.export(what, on_host=on_host)

    def offer(self, name: str, options: SenderOptions, *, version: int) -> RankOffer:
        """Let engines fetch this rank's weights: from a GPU over NCCL, and at the rank's address unless it is loopback.

        Args:
            name: Name of the model.
            options: How the learner sends; its ranks share the bytes of a bucket.
            version: Policy version of the weights.
        """
        is_elsewhere = not ipaddress.ip_address(self._context.address).is_loopback
        own = replace(
            options,
            backend="tcp" if own_device().type == "cpu" else "nccl",
            host=self._context.address if is_elsewhere else options.host,
            bucket_bytes=max(1, options.bucket_bytes // self._context.size),
        )
        return self._loaded(name).offer(own, version=version)

    async def expect_engines(self, name: str, num_receivers: int) -> None:
        """Set how many engines a model's sender expects, without blocking other calls."""
        self._model(name).sender.expect(num_receivers)

    def begin_save(self, name: str, directory: Path) -> None:
        """Copy the state of a model, then write it in the background."""
        pieces = self._loaded(name).tensors.state_pieces()
        write = partial(write_pieces, directory, pieces, rank=self._context.rank)
        self._savings[directory] = in_daemon_thread(write, name="save")

    def finish_save(self, directory: Path) -> list[StoredPiece]:
        """Wait until the files of `begin_save` are on disk."""
        return self._savings.pop(directory).result()

    async def wait_for_save(self, directory: Path) -> list[StoredPiece]:
        """Run `finish_save` without blocking other calls."""
        return await asyncio.to_thread(self.finish_save, directory)

    def read_state(self, name: str, directory: Path) -> str | None:
        """Read the files of `begin_save`, written under any layout, for `apply_state`; return the error, or None.

        The error is returned because raising it would stop all ranks and lose their models.
        """
        states, blocks = self._loaded(name).tensors.empty_state()
        wanted = [(f"{kind}/{block.name}", block) for kind, of_kind in blocks.items() for block in of_kind]
        pieces = [
            Piece(name=full, shape=block.shape, offsets=block.offsets, tensor=torch.empty(block.sizes))
            for full, block in wanted
        ]
        try:
            TensorFolder(directory).read(pieces)
        except CheckpointError as error:
            return str(error)
        for piece, (_, block) in zip(pieces, wanted, strict=True):
            block.write(piece.tensor)
        self._read[name] = states
        return None

    def apply_state(self, name: str, *, step: int) -> None:
        """Continue a model from the state that `read_state` loaded on every rank."""
        self._loaded(name).load_state(self._read.pop(name), step=step)

    def forget_state(self, name: str) -> None:
        """Free the state that `read_state` loaded; the model is unchanged."""
        self._read.pop(name, None)

    def drop(self, name: str) -> None:
        """Free a model."""
        if name in self._models:
            self._models.pop(name).close()

    def close(self) -> None:
        """Free all models; process groups stay because other code in the process may use them."""
        for name in list(self._models):
            self.drop(name)

    def offload(self, name: str) -> int:
        """Free a model's memory until its next call, which restores it; return the bytes freed."""
        return self._model(name).offload()

    def _model(self, name: str) -> RankModel:
        if name not in self._models:
            raise NotReadyError(f"model {name!r} does not exist, or was closed. Build a new learner.")
        return self._models[name]

    def _loaded(self, name: str) -> RankModel:
        self._model(name).reload()
        return self._models[name]
