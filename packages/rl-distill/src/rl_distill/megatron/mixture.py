"""Mixtures of experts: Megatron's layer with a router that can replay choices.

The router is that of Qwen3-MoE (softmax over all experts in float32, then the top_k) or of GLM (sigmoids, then the
top_k by score plus bias within the best groups). Probabilities are divided by their sum if the policy's configuration
requires it. No token is dropped, there is no auxiliary loss, and the bias is never updated.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from rl_distill.architecture.mixture_config import SigmoidRouting
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.linear_map import linear_map
from rl_distill.megatron.experts import Experts


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
        rows = linear_map(hidden, self._order, self._places, forward=_to_experts, backward=_from_experts)
        return rows, counts, shares.flatten().index_select(0, self._order)

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Return the sum [T, hidden] of each token's rows."""
        return linear_map(rows, self._order, self._places, forward=_from_experts, backward=_to_experts)

    def token_combine(self, hidden: Tensor) -> Tensor:
        """Sum outputs over the ranks that split the same experts; each rank receives its own tokens."""
        if self._group.size() == 1:
            return hidden
        return reduce_scatter_to_sequence_parallel_region(hidden, group=self._group)  # type: ignore[no-any-return]

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Return the outputs as [T, 1, hidden]."""
        return hidden.view(self._shape)


def _to_experts(hidden: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Copy tokens into one row per expert; order [T * top_k] has the tokens, places [T, top_k] their positions."""
    return hidden.index_select(0, order.div(places.shape[1], rounding_mode="floor"))


def _from_experts(rows: Tensor, _order: Tensor, places: Tensor) -> Tensor:
    """Sum each token's rows. Neither this nor its gradient writes to one place twice: the sums are deterministic."""
    return rows.index_select(0, places.flatten()).view(*places.shape, rows.shape[-1]).sum(1)


_DISPATCHER = {"moe_token_dispatcher_type": "alltoall"}
"""Setting that variable_seq_lengths requires, even for dense policies."""


def mixture_settings(policy: PolicyConfig) -> dict[str, Any]:
    """Return Megatron's settings for a policy's mixtures of experts."""
    mixture = policy.mixture
    if mixture is None:
        return _DISPATCHER
    return {
        **_DISPATCHER,
        "num_moe_experts": mixture.num_experts,
        "moe_ffn_hidden_size": mixture.ffn_hidden_size,
        "moe_layer_freq": [int(policy.is_mixture(index)) for index in range(policy.num_layers)],
        "moe_router_topk": mixture.top_k,
        # A softmax over only the selected experts equals one over all experts divided by the sum of the selected.
        "moe_router_pre_softmax": not mixture.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": mixture.shared_ffn_hidden_size or None,
        **_sigmoid_settings(mixture.sigmoid),
    }


def _sigmoid_settings(sigmoid: SigmoidRouting | None) -> dict[str, Any]:
    """Return the settings of sigmoid routing. Excludes moe_router_enable_expert_bias, which would update the bias."""
    if sigmoid is None:
        return {}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": sigmoid.num_groups,
        "moe_router_group_topk": sigmoid.top_groups,
        "moe_router_topk_scaling_factor": sigmoid.scaling,
    }


def mixture_spec(shared: MLPSubmodules) -> ModuleSpec:
    """Return the specification of a layer's mixture of experts.

    Args:
        shared: Submodules of the shared experts, if the policy has some.
    """
    submodules = MoESubmodules(
        experts=ModuleSpec(module=Experts),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
        router=ReplayRouter,
    )
    return ModuleSpec(module=MoELayer, submodules=submodules)


def dispatch_locally(mixture: MoELayer) -> None:
    """Replace Megatron's dispatcher by `LocalDispatcher` if each rank has all experts, or a slice of all."""
    if mixture.ep_group.size() == 1:
        mixture.token_dispatcher = LocalDispatcher(mixture.config, group=mixture.token_dispatcher.tp_group)


def _in_best_groups(scores: Tensor, routing: SigmoidRouting) -> Tensor:
    """Return the scores [T, experts] for selection, with minus infinity in groups that are not selected.

    Source: DeepSeek-V3, arXiv:2412.19437. Megatron instead sums the top_k / top_groups highest scores of a group.
    """
    groups = torch.unflatten(scores, -1, (routing.num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
    is_best = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, value=True)
    return groups.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(1)


def route(
    logits: Tensor,
    *,
    top_k: int,
    is_normalized: bool,
    given: Tensor | None,
    sigmoid: SigmoidRouting | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select experts for tokens, or use given experts with the router's probabilities.

    Args:
        logits: [T, experts].
        top_k: Experts per token.
        is_normalized: True to divide the probabilities of a token's experts by their sum.
        given: [T, top_k] int64 experts to use; None for none. Tokens without top_k different valid experts, such as
            rows of -1, use the router's selection.
        sigmoid: Sigmoid routing; None for softmax.
        bias: [experts] float32, added to sigmoid scores for the selection only; None for none.

    Returns:
        Probabilities [T, experts] in the dtype of the logits, 0 for experts not selected, and a [T, experts] bool mask
        of selected experts. Results do not depend on the order of the given experts.
    """
    probabilities = torch.softmax(logits, -1, torch.float32) if sigmoid is None else logits.float().sigmoid()
    ranked = probabilities.detach()
    if sigmoid is not None:
        ranked = _in_best_groups(ranked if bias is None else ranked + bias, sigmoid)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(1, ranked.topk(top_k, dim=-1).indices, value=True)
    if given is not None:
        known = given.clamp(0, logits.shape[-1] - 1)
        replayed = torch.zeros_like(chosen).scatter_(1, known, value=True)
        is_given = (given == known).all(-1) & (replayed.sum(-1) == top_k)
        chosen = torch.where(is_given[:, None], replayed, chosen)
    probabilities = probabilities.masked_fill(~chosen, 0.0)
    if is_normalized:
        probabilities = probabilities / (probabilities.sum(-1, keepdim=True) + (0.0 if sigmoid is None else 1e-20))
    if sigmoid is not None:
        probabilities = probabilities * sigmoid.scaling
    return probabilities.to(logits.dtype), chosen


class ReplayRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, with the policy family's selection or the experts used at rollout.

    Attributes:
        rerouted: [T] bool for the last tokens with given experts: True if the router would have chosen others.
    """

    rerouted: Tensor
    expert_bias: torch.nn.Parameter | None

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        """Create the router's weight and, for sigmoid routing, its bias, which has no gradient and stays float32.

        Args:
            config: Megatron's TransformerConfig.
            pg_collection: Megatron's process groups.
        """
        super().__init__(config=config, pg_collection=pg_collection)
        self._given: Tensor | None = None
        self._sigmoid: SigmoidRouting | None = None
        if config.moe_router_score_function == "sigmoid":
            self._sigmoid = SigmoidRouting(
                num_groups=config.moe_router_num_groups,
                top_groups=config.moe_router_group_topk,
                scaling=config.moe_router_topk_scaling_factor,
            )
            self.expert_bias = torch.nn.Parameter(torch.zeros(config.num_moe_experts), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ReplayRouter":
        """Cast and move the tensors as torch does, but only move the bias."""
        bias = self.expert_bias
        exact = None if bias is None else bias.data
        super()._apply(fn, recurse)
        if bias is not None and exact is not None:
            bias.data = exact.to(bias.device)
        return self

    @contextlib.contextmanager
    def replaying(self, experts: Tensor | None) -> Iterator[None]:
        """Use these experts inside the context.

        Args:
            experts: [T, top_k] int64 experts of the next tokens, -1 where the router selects; None to let it select for
                all tokens.
        """
        self._given = experts
        try:
            yield
        finally:
            self._given = None

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 - megatron's signature
        """Return logits [T, 1, experts] of tokens [T, 1, hidden]."""
        # Megatron's version fails on 0 tokens, and without te_general_gemm, which Transformer Engine defines.
        if self.expert_bias is None:
            return F.linear(input, self.weight)
        return F.linear(input.float(), self.weight.float())  # as in transformers and vLLM for GLM

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - megatron's signature
        """Return probabilities and selected experts of tokens.

        Args:
            logits: [T, 1, experts].
            padding_mask: Unused; every token counts.

        Returns:
            The results of `route`.
        """
        is_normalized = not self.config.moe_router_pre_softmax
        rows = logits.view(-1, self.config.num_moe_experts)
        routed = partial(
            route, rows, top_k=self.topk, is_normalized=is_normalized, sigmoid=self._sigmoid, bias=self.expert_bias
        )
        probabilities, chosen = routed(given=self._given)
        if self._given is not None:
            with torch.no_grad():  # costs about 1 % of the experts
                self.rerouted = (chosen != routed(given=None)[1]).any(-1)
        return probabilities, chosen
