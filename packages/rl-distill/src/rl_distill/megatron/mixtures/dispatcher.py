"""Dispatch tokens to experts and back by sorting, without the host, if each rank has all experts.

Megatron's dispatchers select tokens by masks. The host must know the number of selected tokens, so it waits for the
GPU.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor


class LocalDispatcher:
    """Dispatcher that sorts tokens by expert, with the interface of Megatron's dispatchers.

    Ranks that split the same experts first share all their tokens. As in Megatron's dispatcher, the rows of an expert
    are in token order, and a token's outputs are summed in the order of its experts.
    """

    def __init__(self, config: Any, *, group: Any) -> None:
        """Store Megatron's configuration and the group of ranks that split the same experts."""
        self._top_k, self._num_experts, self._group = config.moe_router_topk, config.num_moe_experts, group

    def dispatch_preprocess(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a map of choices to the experts of each token.

        Args:
            hidden: [T, 1, hidden].
            chosen: [T, experts] bool, with exactly top_k True per token.
            probabilities: [T, experts].

        Returns:
            [T, hidden], and the probabilities [T, top_k] of each token's experts in ascending order of index.
        """
        self._shape = hidden.shape
        places = torch.arange(self._num_experts, 0, -1, dtype=torch.int32, device=chosen.device)
        self._experts = (chosen * places).topk(self._top_k, dim=-1).indices
        return hidden.flatten(0, -2), probabilities.gather(-1, self._experts)

    def token_dispatch(self, hidden: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the tokens of all ranks that split the same experts."""
        if self._group.size() > 1:
            hidden, shares = (gather_from_sequence_parallel_region(one, group=self._group) for one in (hidden, shares))
            self._experts = gather_from_sequence_parallel_region(self._experts, group=self._group)
        return hidden, shares

    def dispatch_postprocess(self, hidden: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort tokens by expert.

        Returns:
            [T * top_k, hidden] rows, [experts] number of rows of each expert, and the share [T * top_k] of each row.
        """
        experts = self._experts.flatten()
        self._order = experts.argsort(stable=True)
        ranks = torch.arange(len(experts), device=experts.device)
        self._places = torch.empty_like(self._order).scatter_(0, self._order, ranks).view_as(self._experts)
        counts = experts.new_zeros(self._num_experts).scatter_add_(0, experts, torch.ones_like(experts))
        rows = _ToExperts.apply(hidden, self._order, self._places)  # type: ignore[no-untyped-call]
        return rows, counts, shares.flatten().index_select(0, self._order)

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Return the sum [T, hidden] of each token's rows."""
        return _FromExperts.apply(rows, self._order, self._places)  # type: ignore[no-any-return, no-untyped-call]

    def token_combine(self, hidden: Tensor) -> Tensor:
        """Sum outputs over the ranks that split the same experts; each rank receives its own tokens."""
        if self._group.size() == 1:
            return hidden
        return reduce_scatter_to_sequence_parallel_region(hidden, group=self._group)  # type: ignore[no-any-return]

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Return the outputs as [T, 1, hidden]."""
        return hidden.view(self._shape)


class _ToExperts(torch.autograd.Function):
    """Tokens copied into one row per expert; order [T * top_k] has the tokens, places [T, top_k] their positions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return _spread(hidden, order, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grads[0], *ctx.saved_tensors), None, None


class _FromExperts(torch.autograd.Function):
    """Sums of each token's rows. Neither pass writes to one place twice, so the sums are deterministic."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return _summed(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _spread(grads[0], *ctx.saved_tensors), None, None


def _spread(hidden: Tensor, order: Tensor, places: Tensor) -> Tensor:
    return hidden.index_select(0, order.div(places.shape[1], rounding_mode="floor"))


def _summed(rows: Tensor, places: Tensor) -> Tensor:
    return rows.index_select(0, places.flatten()).view(*places.shape, rows.shape[-1]).sum(1)
