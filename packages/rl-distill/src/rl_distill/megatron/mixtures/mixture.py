"""Mixtures of experts: megatron's layer, with a router that can replay choices.

The router is Qwen3-MoE's, a softmax over all experts in float32 and the largest few, or GLM's, sigmoids and the largest
few of the best groups by these and a bias; either way divided by their sum where the policy says so. No token is
dropped, no auxiliary loss added, and the bias stays as it was loaded.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from rl_distill.architecture.mixture_config import SigmoidRouting
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.megatron.mixtures.dispatcher import LocalDispatcher
from rl_distill.megatron.mixtures.experts import Experts

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
        "moe_shared_expert_intermediate_size": mixture.shared_ffn_hidden_size or None,
        **_sigmoid_settings(mixture.sigmoid),
    }


def _sigmoid_settings(sigmoid: SigmoidRouting | None) -> dict[str, Any]:
    """Without moe_router_enable_expert_bias, with which megatron would change the bias at each step."""
    if sigmoid is None:
        return {}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": sigmoid.num_groups,
        "moe_router_group_topk": sigmoid.top_groups,
        "moe_router_topk_scaling_factor": sigmoid.scaling,
    }


def mixture_spec(shared: MLPSubmodules) -> ModuleSpec:
    """A layer's mixture of experts.

    Args:
        shared: Parts of its shared experts, where the policy has some.
    """
    submodules = MoESubmodules(
        experts=ModuleSpec(module=Experts),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
        router=ReplayRouter,
    )
    return ModuleSpec(module=MoELayer, submodules=submodules)


def dispatch_locally(mixture: MoELayer) -> None:
    """Exchange megatron's dispatcher for ours where a rank has all experts, or its slice of all."""
    if mixture.ep_group.size() == 1:
        mixture.token_dispatcher = LocalDispatcher(mixture.config, group=mixture.token_dispatcher.tp_group)


class SigmoidScores(NamedTuple):
    """How sigmoids choose experts.

    Attributes:
        bias: [experts] float32, counts for the choice alone.
        num_groups: Groups of experts.
        top_groups: Groups of a token: those with the largest sums of their two largest biased scores.
        scaling: Multiplies the probabilities of the chosen.
    """

    bias: Tensor
    num_groups: int
    top_groups: int
    scaling: float

    def ranked(self, scores: Tensor) -> Tensor:
        """[T, experts] by which a token's experts are chosen; minus infinity in groups that are not.

        Source: DeepSeek-V3, arXiv:2412.19437; megatron's own sums the top_k / top_groups largest of a group.
        """
        groups = torch.unflatten(scores + self.bias, -1, (self.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
        is_best = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, value=True)
        return groups.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(1)


def route(
    logits: Tensor, *, top_k: int, is_normalized: bool, given: Tensor | None, sigmoid: SigmoidScores | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of tokens, or take given ones with the router's own probabilities of them.

    Args:
        logits: [T, experts].
        top_k: Experts of a token.
        is_normalized: Divide the probabilities of a token's experts by their sum.
        given: [T, top_k] int64 experts to take; None for none. A token whose row is not of top_k different experts,
            such as -1 everywhere, gets those with the largest probabilities.
        sigmoid: Take sigmoids for probabilities, and choose by these; None for the softmax.

    Returns:
        Probabilities [T, experts] in the dtype of the logits, 0 of those not chosen, and [T, experts] bool, True of
        the chosen. The order in which the choices are given does not matter.
    """
    probabilities = torch.softmax(logits, -1, torch.float32) if sigmoid is None else logits.float().sigmoid()
    ranked = probabilities.detach() if sigmoid is None else sigmoid.ranked(probabilities.detach())
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
    """megatron's router, choosing as the policy's family does, or taking the experts that were chosen at rollout.

    Attributes:
        rerouted: [T] bool of the last tokens that were given experts: True where it would choose others.
    """

    rerouted: Tensor
    expert_bias: torch.nn.Parameter | None

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        """Make the router's weight, and its bias where it has one: no gradient reaches it, and it stays float32.

        Args:
            config: megatron's TransformerConfig.
            pg_collection: megatron's process groups.
        """
        super().__init__(config=config, pg_collection=pg_collection)
        self._given: Tensor | None = None
        if config.moe_router_score_function == "sigmoid":
            self.expert_bias = torch.nn.Parameter(torch.zeros(config.num_moe_experts), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ReplayRouter":
        """As torch's, which casts and moves a module's tensors; the bias is moved alone."""
        bias = self.expert_bias
        exact = None if bias is None else bias.data
        super()._apply(fn, recurse)
        if bias is not None and exact is not None:
            bias.data = exact.to(bias.device)
        return self

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
        if self.expert_bias is None:
            return F.linear(input, self.weight)
        return F.linear(input.float(), self.weight.float())  # as transformers and vLLM compute GLM's

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
        sigmoid = self._sigmoid_scores()
        routed = partial(route, rows, top_k=self.topk, is_normalized=is_normalized, sigmoid=sigmoid)
        probabilities, chosen = routed(given=self._given)
        if self._given is not None:
            with torch.no_grad():  # a hundredth of what its experts take
                self.rerouted = (chosen != routed(given=None)[1]).any(-1)
        return probabilities, chosen

    def _sigmoid_scores(self) -> SigmoidScores | None:
        if self.expert_bias is None:
            return None
        config = self.config
        groups, top_groups = config.moe_router_num_groups, config.moe_router_group_topk
        return SigmoidScores(self.expert_bias, groups, top_groups, config.moe_router_topk_scaling_factor)
