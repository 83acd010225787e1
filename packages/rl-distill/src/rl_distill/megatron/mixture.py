"""Mixtures of experts: megatron's layer and dispatcher, with a router that can replay choices.

The router is Qwen3-MoE's: a softmax over all experts in float32, the largest few, divided by their sum where the
policy says so. No token is dropped and no auxiliary loss added.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from rl_distill.megatron.experts import Experts
from rl_distill.policy_config import PolicyConfig

_DISPATCHER = {"moe_token_dispatcher_type": "alltoall"}
"""variable_seq_lengths asks for it, in dense policies too."""


def mixture_settings(policy: PolicyConfig) -> dict[str, Any]:
    """What megatron's configuration says about a policy's mixtures of experts."""
    mixture = policy.mixture
    if mixture is None:
        return _DISPATCHER
    return {
        **_DISPATCHER,
        "num_moe_experts": mixture.num_experts,
        "moe_ffn_hidden_size": mixture.ffn_hidden_size,
        "moe_layer_freq": [int(policy.is_mixture(index)) for index in range(policy.num_layers)],
        "moe_router_topk": mixture.top_k,
        # megatron's name for it: a softmax over the chosen alone is one over all, divided by the sum of the chosen.
        "moe_router_pre_softmax": not mixture.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def mixture_spec(expert: MLPSubmodules) -> ModuleSpec:
    """A layer's mixture of experts."""
    experts = ModuleSpec(module=Experts, submodules=expert)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=ReplayRouter))


def route(logits: Tensor, *, top_k: int, is_normalized: bool, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the experts of tokens, or take given ones with the router's own probabilities of them.

    Args:
        logits: [T, experts].
        top_k: Experts of a token.
        is_normalized: Divide the probabilities of a token's experts by their sum.
        given: [T, top_k] int64 experts to take; None for none. A token whose row is not of top_k different experts,
            such as -1 everywhere, gets those with the largest probabilities.

    Returns:
        Probabilities [T, experts] in the dtype of the logits, 0 of those not chosen, and [T, experts] bool, True of
        the chosen. The order in which the choices are given does not matter.
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(1, probabilities.detach().topk(top_k, dim=-1).indices, value=True)
    if given is not None:
        known = given.clamp(0, logits.shape[-1] - 1)
        replayed = torch.zeros_like(chosen).scatter_(1, known, value=True)
        is_given = (given == known).all(-1) & (replayed.sum(-1) == top_k)
        chosen = torch.where(is_given[:, None], replayed, chosen)
    probabilities = probabilities.masked_fill(~chosen, 0.0)
    if is_normalized:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities.to(logits.dtype), chosen


class ReplayRouter(TopKRouter):  # type: ignore[misc]
    """megatron's router, choosing as Qwen3-MoE does, or taking the experts that were chosen at rollout.

    Attributes:
        rerouted: [T] bool of the last tokens that were given experts: True where it would choose others.
    """

    rerouted: Tensor

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        """Make the router's weight.

        Args:
            config: megatron's TransformerConfig.
            pg_collection: megatron's process groups.
        """
        super().__init__(config=config, pg_collection=pg_collection)
        self._given: Tensor | None = None

    @contextlib.contextmanager
    def replaying(self, experts: Tensor | None) -> Iterator[None]:
        """Take these experts inside the context.

        Args:
            experts: [T, top_k] int64 of the tokens that come, -1 where the router chooses; None for everywhere.
        """
        self._given = experts
        try:
            yield
        finally:
            self._given = None

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 - megatron's signature
        """Logits [T, 1, experts] of tokens [T, 1, hidden]."""
        # megatron's own fails on 0 tokens, and on te_general_gemm, a name that comes with Transformer Engine.
        return F.linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - megatron's signature
        """Probabilities and choices of tokens.

        Args:
            logits: [T, 1, experts].
            padding_mask: Not used; every token counts.

        Returns:
            As `route`.
        """
        is_normalized = not self.config.moe_router_pre_softmax
        rows = logits.view(-1, self.config.num_moe_experts)
        routed = partial(route, rows, top_k=self.topk, is_normalized=is_normalized)
        probabilities, chosen = routed(given=self._given)
        if self._given is not None:
            with torch.no_grad():  # a hundredth of what its experts take
                self.rerouted = (chosen != routed(given=None)[1]).any(-1)
        return probabilities, chosen
