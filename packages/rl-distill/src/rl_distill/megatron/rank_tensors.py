"""A rank's tensors by Hugging Face name: for export, for checkpoints, and for memory accounting."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_core.weights import LORA_A, LORA_B, PEFT_PREFIX, Rectangle
from rl_core.weights.broadcast import HeldRectangle
from rl_distill.architecture.lora_targets import adapted_tensor
from rl_distill.architecture.tensor_shapes import is_hidden_matrix, tensor_shapes
from rl_distill.checkpoints.pieces import Piece
from rl_distill.megatron.convert import Shard, TensorBlock, held_rows
from rl_distill.megatron.lora import PARAMETER
from rl_distill.megatron.optimizer import AVERAGE, Parameters, RankAdam
from rl_distill.megatron.overlap import gather_weights
from rl_distill.megatron.parallel import group_of_copies
from rl_distill.megatron.setup import ModelPlan, chunk_blocks, fill_adapter

States = Mapping[str, Sequence[Mapping[str, Tensor]]]
"""float32 weights and moments: by kind, one mapping per model chunk of the rank, by Megatron's name."""

Exported = Literal["weights", "base", "adapter"]
"""Tensors to export: the weights with an adapter merged, the base weights, or an adapter's A and scaled B."""


class RankTensors:
    """The tensors of a rank's model chunks and of their optimizer; every rank calls the same methods together.

    Attributes:
        scaling: Factor of the adapter's product.
    """

    def __init__(
        self,
        plan: ModelPlan,
        chunks: Sequence[Any],
        shards: Sequence[Shard],
        adam: RankAdam | None,
    ) -> None:
        """Wrap the built model.

        Args:
            plan: The plan that the model was built from.
            chunks: The rank's model chunks.
            shards: One shard per chunk.
            adam: Optimizer of the chunks; None for a frozen model.
        """
        self._plan, self._chunks, self._shards, self._adam = plan, chunks, shards, adam
        self.scaling = plan.lora.scaling if plan.lora.rank else 1.0

    def kept(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the weights, the gradients and the optimizer's state."""
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        weights = [held_rows(parameter.data) for parameter in parameters]
        if self._adam is None:
            return weights, [], []
        if self._plan.parallel.shard_weights:
            gradients = [held_rows(parameter.grad) for parameter in parameters if parameter.grad is not None]
            return weights, gradients, list(self._adam.tensors())
        return weights, self._adam.gradients(), list(self._adam.tensors())

    def num_parameters(self) -> int:
        """Return the number of policy elements whose primary copy is on this rank, without an adapter's."""
        return sum(int(np.prod(block.sizes)) for block in self._own(self._blocks(self._base())))

    def export(self, what: Exported, *, on_host: bool) -> list[Piece]:
        """Return this rank's exported pieces: views of its tensors, or copies.

        A and B have peft's names, and B is scaled. Merging is computed in float32 and does not change the base.

        Args:
            what: Tensors to export.
            on_host: True to copy to the CPU for another process; False to leave tensors on the rank's device.
        """
        if what == "adapter":
            own = self._own(self._blocks(self._adapter()))
            pieces = [_piece(block, _scaled(block, self.scaling), name=PEFT_PREFIX + block.name) for block in own]
        else:
            added = self._added() if what == "weights" else {}
            own = self._own(self._blocks(self._base()))
            pieces = [_piece(block, self._served(block, added)) for block in own]
        return [replace(piece, tensor=piece.tensor.cpu()) for piece in pieces] if on_host else pieces

    def held(self) -> list[HeldRectangle]:
        """Return this rank's rectangles of the weights, with an adapter merged, in the order of the tensors.

        A rectangle is read on its device when it is requested, so its values are those of the weights at that time.
        """
        added = self._added()
        places = {name: place for place, name in enumerate(tensor_shapes(self._plan.source.config))}
        return [
            HeldRectangle(
                rectangle=Rectangle(block.name, block.offsets, block.sizes),
                shape=block.shape,
                read=partial(self._served, block, added),
            )
            for block in sorted(self._own(self._blocks(self._base())), key=lambda one: (places[one.name], one.offsets))
        ]

    def state_pieces(self) -> list[Piece]:
        """Return copies of this rank's checkpoint state: float32 weights (or the adapter) and Adam's moments."""
        adam, parameters = self.adam, self._parameters()
        with adam.on_device():
            states = {name: [adam.moments(chunk, name) for chunk in parameters] for name in self.adam.kinds}
            masters = [adam.master_weights(chunk) for chunk in parameters]
            states["weights"] = [{**w, **(m or {})} for w, m in zip(self._saved(), masters, strict=True)]
            return [
                _piece(block, block.read().to("cpu", torch.float32, copy=True), name=f"{kind}/{block.name}")
                for kind, state in states.items()
                for block in self._own(self._blocks(state))
            ]

    def empty_state(self) -> tuple[States, dict[str, list[TensorBlock]]]:
        """Return float32 tensors to load a checkpoint into, by Megatron's name per chunk, and their blocks."""
        of_kind: States = {"weights": self._saved(), **{name: self._parameters() for name in self.adam.kinds}}
        states = {
            kind: [{n: torch.zeros_like(p, dtype=torch.float32).detach() for n, p in chunk.items()} for chunk in chunks]
            for kind, chunks in of_kind.items()
        }
        return states, {name: self._blocks(state) for name, state in states.items()}

    def load_state(self, states: States, *, step: int) -> None:
        """Continue from the state loaded into `empty_state`."""
        adam = self.adam
        is_bf16 = self._plan.dtype != torch.float32
        with torch.no_grad(), adam.on_device():
            for index, parameters in enumerate(self._parameters()):
                weights = states["weights"][index]
                for name, live in self._saved()[index].items():
                    live.copy_(weights[name])
                moments = {name: states[name][index] for name in self.adam.kinds}
                adam.load(parameters, step=step, moments=moments, master=weights if is_bf16 else None)

    def hidden_matrices(self) -> Iterator[tuple[torch.nn.Parameter, Callable[[Tensor], list[TensorBlock]]]]:
        """Yield each parameter that Muon trains, with the function that returns the matrices in a tensor like it."""
        for parameters, shard in zip(self._parameters(), self._shards, strict=True):
            for name, parameter in parameters.items():
                blocks = partial(_blocks_like, name, self._plan, shard)
                if all(is_hidden_matrix(block.name, block.shape) for block in blocks(parameter)):
                    yield parameter, blocks

    def adapter_state(self) -> list[Tensor]:
        """Return the adapter's A and B on this rank, their moments and float32 weights, always in the same order."""
        adapter = [tensor for chunk in self._adapter() for tensor in chunk.values()]
        self.adam.start_moments()
        return [*adapter, *self.adam.tensors()]

    def start_adapter(self, *, seed: int, rank: int, frozen: Sequence[str] = ()) -> None:
        """Start a new adapter in place of the one in training, as the model's first one would with this seed.

        Args:
            seed: Seed of A.
            rank: Rank of the adapter; A is 0 beyond it, and stays 0 because B is 0 too.
            frozen: Shell patterns of matrices whose A is 0.
        """
        plan = replace(self._plan, options=replace(self._plan.options, seed=seed))
        with torch.no_grad(), self.adam.on_device():
            for adapter, parameters, shard in zip(self._adapter(), self._parameters(), self._shards, strict=True):
                fill_adapter(adapter, plan, shard, rank=rank, frozen=frozen)
                master = {name: parameter.detach().float() for name, parameter in parameters.items()}
                self.adam.load(parameters, step=0, moments={}, master=master if plan.dtype != torch.float32 else None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the moving average of the weights inside the context."""
        with torch.no_grad(), self.adam.on_device():
            chunks = self._parameters()
            live = [parameter.detach().clone() for chunk in chunks for parameter in chunk.values()]
            for chunk in chunks:
                for name, average in self.adam.moments(chunk, AVERAGE).items():
                    chunk[name].copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in zip((p for chunk in chunks for p in chunk.values()), live, strict=True):
                    parameter.copy_(own)

    @property
    def adam(self) -> RankAdam:
        """Optimizer of the chunks.

        Raises:
            TypeError: The model is frozen.
        """
        if self._adam is None:
            raise TypeError("a frozen model has no optimizer")
        return self._adam

    def _served(self, block: TensorBlock, adapter: Mapping[str, TensorBlock]) -> Tensor:
        """Return a rectangle of the weights with the adapter merged, in the policy's dtype."""
        merged = _merged(block, adapter, self.scaling)
        return merged.to(self._plan.dtype) if block.is_divided else merged

    def _own(self, blocks: Sequence[TensorBlock]) -> list[TensorBlock]:
        """Return the blocks that this rank exports: those that no other has, and its share of the copies."""

        def gives(number: int, block: TensorBlock) -> bool:
            group = group_of_copies(of_experts=block.is_expert)
            return number % group.size() == group.rank()

        copies = enumerate(b for b in blocks if not b.is_divided)
        shared = [b for number, b in copies if b.is_primary and 0 not in b.sizes and gives(number, b)]
        return [*(b for b in blocks if b.is_divided), *shared]

    def _parameters(self) -> list[Parameters]:
        """Return the trained parameters by Megatron's name."""
        return [{n: p for n, p in chunk.items() if p.requires_grad} for chunk in self._named()]

    def _base(self) -> list[Mapping[str, Tensor]]:
        """Return all tensors in a policy's folder by Megatron's name, including a router's untrained bias."""
        return [{n: p.detach() for n, p in chunk.items() if PARAMETER not in n} for chunk in self._named()]

    def _adapter(self) -> list[Mapping[str, Tensor]]:
        """Return A and B by Megatron's name."""
        return [{n: p.detach() for n, p in chunk.items() if PARAMETER in n} for chunk in self._named()]

    def _added(self) -> dict[str, TensorBlock]:
        """Return A and B by the folder's name of the matrix that they change."""
        found = {}
        for block in self._blocks(self._adapter()):
            module, kind, rest = block.name.partition(PARAMETER)
            tensor = adapted_tensor(module, self._plan.source.config)
            found[f"{tensor.removesuffix('.weight')}{kind}{rest}"] = block
        return found

    def _saved(self) -> list[Mapping[str, Tensor]]:
        """Return the weights that a checkpoint saves."""
        return self._adapter() if self._plan.lora.rank else self._base()

    def _named(self) -> list[Parameters]:
        gather_weights(self._chunks)
        return [
            {name.removeprefix("module.").removeprefix("module."): p for name, p in chunk.named_parameters()}
            for chunk in self._chunks
        ]

    def _blocks(self, states: Sequence[Mapping[str, Tensor]]) -> list[TensorBlock]:
        pairs = zip(states, self._shards, strict=True)
        return [block for state, shard in pairs for block in chunk_blocks(state, self._plan, shard)]


def _blocks_like(name: str, plan: ModelPlan, shard: Shard, tensor: Tensor) -> list[TensorBlock]:
    """Return the blocks of a tensor that has the shape of the named parameter."""
    return chunk_blocks({name: tensor}, plan, shard)


def _piece(block: TensorBlock, tensor: Tensor, *, name: str | None = None) -> Piece:
    return Piece(name=name or block.name, shape=block.shape, offsets=block.offsets, tensor=tensor)


def _scaled(block: TensorBlock, scaling: float) -> Tensor:
    """Return A unchanged, or B times the scaling."""
    tensor = block.read()
    return tensor.float().mul(scaling).to(tensor.dtype) if block.name.endswith(LORA_B) else tensor


def _merged(block: TensorBlock, adapter: Mapping[str, TensorBlock], scaling: float) -> Tensor:
    """Return a rectangle of the base plus, if the matrix has an adapter, the same rectangle of scaling * B @ A."""
    base, module = block.read(), block.name.removesuffix(".weight")
    if module + LORA_A not in adapter:
        return base
    a, b = (adapter[module + kind].read().float() for kind in (LORA_A, LORA_B))
    return torch.addmm(base.float(), b, a, alpha=scaling).to(base.dtype)
