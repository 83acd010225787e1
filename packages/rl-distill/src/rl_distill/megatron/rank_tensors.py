"""A rank's tensors by Hugging Face name: those that it exports, those that a checkpoint has, and what they take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_core.weights import LORA_A, LORA_B, PEFT_PREFIX, Rectangle
from rl_core.weights.broadcast import HeldRectangle
from rl_distill.architecture.model_memory import RankMemory
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.checkpoints.torch_dist import Piece
from rl_distill.megatron.convert import Block, Shard
from rl_distill.megatron.lora import PARAMETER
from rl_distill.megatron.optimizer import MegatronAdam, Parameters
from rl_distill.megatron.parallel import group_of_copies
from rl_distill.megatron.setup import ModelPlan, chunk_blocks

States = Mapping[str, Sequence[Mapping[str, Tensor]]]
"""float32 weights and moments: by kind, for each chunk of the rank's model, by megatron's name."""

Exported = Literal["weights", "base", "adapter"]
"""What is exported: the weights, an adapter merged into them; the weights under it; its A and scaled B."""


class RankTensors:
    """The tensors of a rank's model chunks and of their optimizer; every rank calls the same methods together."""

    def __init__(
        self,
        plan: ModelPlan,
        chunks: Sequence[Any],
        shards: Sequence[Shard],
        adam: MegatronAdam | None,
        *,
        gather: Callable[[], None],
    ) -> None:
        """Take what was built.

        Args:
            plan: What it was built from.
            chunks: The rank's.
            shards: One for each chunk.
            adam: Their optimizer; None where nothing trains.
            gather: Has every weight of the last step on this rank.
        """
        self._plan, self._chunks, self._shards, self._adam = plan, chunks, shards, adam
        self._gather = gather

    def memory(self) -> RankMemory:
        """What the model keeps between calls, as `rank_memory` foretells it."""
        return RankMemory(*(sum(tensor.nbytes for tensor in tensors) for tensors in self.kept()))

    def kept(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Weights, gradients and the optimizer's state."""
        weights = [parameter.data for chunk in self._chunks for parameter in chunk.parameters()]
        if self._adam is None:
            return weights, [], []
        buffers = [b for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return weights, [buffer.grad_data for buffer in buffers], list(self._adam.tensors())

    def num_parameters(self) -> int:
        """Number of policy elements whose primary copy is on this rank; without an adapter's."""
        return sum(int(np.prod(block.sizes)) for block in self._own(self._blocks(self._base())))

    def export(self, what: Exported, *, on_host: bool) -> list[Piece]:
        """What this rank gives out: views of its tensors, or copies.

        A and B have peft's names, and B is scaled. Merging is in float32, and leaves the base as it is.

        Args:
            what: Is given out.
            on_host: On the CPU, for another process; False leaves it on the rank's device.
        """
        pieces = self._exported(what)
        return [replace(piece, tensor=piece.tensor.cpu()) for piece in pieces] if on_host else pieces

    def _exported(self, what: Exported) -> list[Piece]:
        adapter, scaling = self._blocks(self._adapter()), self._plan.lora.scaling if self._plan.lora.rank else 1.0
        if what == "adapter":
            return [
                _piece(block, _scaled(block, scaling), name=PEFT_PREFIX + block.name) for block in self._own(adapter)
            ]
        added = {block.name: block for block in adapter} if what == "weights" else {}
        return [_piece(block, _merged(block, added, scaling)) for block in self._own(self._blocks(self._base()))]

    def held(self) -> list[HeldRectangle]:
        """What this rank gives out of the weights, an adapter merged into them, in the order of the tensors.

        Each is read when it is asked for, where it is: until then it is as the weights are.
        """
        adapter, scaling = self._blocks(self._adapter()), self._plan.lora.scaling if self._plan.lora.rank else 1.0
        added = {block.name: block for block in adapter}
        places = {name: place for place, name in enumerate(tensor_shapes(self._plan.source.config))}
        return [
            HeldRectangle(
                rectangle=Rectangle(block.name, block.offsets, block.sizes),
                shape=block.shape,
                read=partial(_merged, block, added, scaling),
            )
            for block in sorted(self._own(self._blocks(self._base())), key=lambda one: (places[one.name], one.offsets))
        ]

    def state_pieces(self) -> list[Piece]:
        """Copies of this rank's part of what a checkpoint has: float32 weights and Adam's moments, or an adapter's."""
        with self._trained().on_device():
            return self._state_pieces()

    def _state_pieces(self) -> list[Piece]:
        adam, parameters = self._trained(), self._parameters()
        states = {name: [adam.moments(chunk, name) for chunk in parameters] for name in ("exp_avg", "exp_avg_sq")}
        masters = [adam.master_weights(chunk) for chunk in parameters]
        states["weights"] = [{**w, **(m or {})} for w, m in zip(self._saved(), masters, strict=True)]
        return [
            _piece(block, block.read().to("cpu", torch.float32, copy=True).contiguous(), name=f"{kind}/{block.name}")
            for kind, state in states.items()
            for block in self._own(self._blocks(state))
        ]

    def empty_state(self) -> tuple[States, dict[str, list[Block]]]:
        """float32 tensors to read a checkpoint into, by megatron name for each chunk, and their blocks."""
        of_kind: dict[str, Sequence[Mapping[str, Tensor]]]
        of_kind = {"weights": self._saved(), "exp_avg": self._parameters(), "exp_avg_sq": self._parameters()}
        states = {
            kind: [{n: torch.zeros_like(p, dtype=torch.float32).detach() for n, p in chunk.items()} for chunk in chunks]
            for kind, chunks in of_kind.items()
        }
        return states, {name: self._blocks(state) for name, state in states.items()}

    def load_state(self, states: States, *, step: int) -> None:
        """Continue from what was read into `empty_state`."""
        adam = self._trained()
        is_bf16 = self._plan.dtype != torch.float32
        with torch.no_grad(), adam.on_device():
            for index, parameters in enumerate(self._parameters()):
                weights = states["weights"][index]
                for name, live in self._saved()[index].items():
                    live.copy_(weights[name])
                moments = {name: states[name][index] for name in ("exp_avg", "exp_avg_sq")}
                adam.load(parameters, step=step, moments=moments, master=weights if is_bf16 else None)

    def _trained(self) -> MegatronAdam:
        if self._adam is None:
            raise TypeError("a frozen model does not train")
        return self._adam

    def _own(self, blocks: Sequence[Block]) -> list[Block]:
        """Blocks that this rank gives out: of the copies on data-parallel ranks, each gives its share."""

        def gives(number: int, block: Block) -> bool:
            group = group_of_copies(of_experts=block.is_expert)
            return number % group.size() == group.rank()

        return [b for number, b in enumerate(blocks) if b.is_primary and 0 not in b.sizes and gives(number, b)]

    def _parameters(self) -> list[Parameters]:
        """What is trained, by megatron's name."""
        return [{n: p for n, p in chunk.items() if p.requires_grad} for chunk in self._named()]

    def _base(self) -> list[Mapping[str, Tensor]]:
        """All that a policy's folder has, by megatron's name: also a router's bias, which is not trained."""
        return [{n: p.detach() for n, p in chunk.items() if PARAMETER not in n} for chunk in self._named()]

    def _adapter(self) -> list[Mapping[str, Tensor]]:
        """A and B, by megatron's name."""
        return [{n: p.detach() for n, p in chunk.items() if PARAMETER in n} for chunk in self._named()]

    def _saved(self) -> list[Mapping[str, Tensor]]:
        """Weights that a checkpoint has."""
        return self._adapter() if self._plan.lora.rank else self._base()

    def _named(self) -> list[Parameters]:
        self._gather()
        return [
            {name.removeprefix("module.").removeprefix("module."): p for name, p in chunk.named_parameters()}
            for chunk in self._chunks
        ]

    def _blocks(self, states: Sequence[Mapping[str, Tensor]]) -> list[Block]:
        pairs = zip(states, self._shards, strict=True)
        return [block for state, shard in pairs for block in chunk_blocks(state, self._plan, shard)]


def _piece(block: Block, tensor: Tensor, *, name: str | None = None) -> Piece:
    return Piece(name=name or block.name, shape=block.shape, offsets=block.offsets, tensor=tensor)


def _scaled(block: Block, scaling: float) -> Tensor:
    """A as it is, B times the scaling."""
    tensor = block.read()
    return tensor.float().mul(scaling).to(tensor.dtype) if block.name.endswith(LORA_B) else tensor


def _merged(block: Block, adapter: Mapping[str, Block], scaling: float) -> Tensor:
    """A rectangle of the base, plus the same rectangle of scaling * B @ A where there is an adapter for it."""
    base, module = block.read(), block.name.removesuffix(".weight")
    if module + LORA_A not in adapter:
        return base
    a, b = (adapter[module + kind].read().float() for kind in (LORA_A, LORA_B))
    return torch.addmm(base.float(), b, a, alpha=scaling).to(base.dtype)
