"""Experts of one mixture layer, forward and backward, in the learner's way and in others.

All ways have the same tokens, weights and products, and put the weights' gradients into megatron's float32 buffer.
"""

import math
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch.nn import Module

from rl_distill.architecture.policy_config import parse_policy_config
from rl_distill.learners import chosen_products
from rl_distill.megatron.experts import Experts
from rl_distill.megatron.kernels import PLAIN, Kernels, PolicyTransformerConfig
from rl_distill.megatron.layers import SwiGLU
from rl_distill.megatron.model_spec import transformer_config
from rl_distill.products import computing_with, has_onednn

OURS = "ours"
TOLERANCE = 1e-4
"""Relative tolerance of the norm of outputs and all gradients."""
WANTED = 1.0
"""Minimum ratio of the best other way's time to ours, in the median round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a layer; a token has `top_k` rows."""

    num_experts: int = 64
    hidden_size: int = 512
    ffn_hidden_size: int = 256
    top_k: int = 8
    num_tokens: int = 2048


TINY = Sizes(num_experts=4, hidden_size=32, ffn_hidden_size=16, top_k=2, num_tokens=64)
SIZES = {"tiny": (TINY,), "8m": (Sizes(), Sizes(num_tokens=256))}
"""Sizes by the learner benchmark's CPU presets."""


def measure(sizes: Sizes, *, rounds: int) -> dict[str, Any]:
    """Processor milliseconds of each way in turns, after a warm-up; the order rotates from round to round.

    Raises:
        ValueError: Two ways compute different results.
    """
    layer, chosen = _Layer(sizes), chosen_products("auto")
    ways = {OURS: (layer.ours, chosen), "grouped": (layer.grouped, chosen), "in_turn_mkl": (layer.megatrons, "torch")}
    if has_onednn():
        ways["in_turn_onednn"] = (layer.megatrons, "onednn")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        norms = {}
        for way, (experts, products) in list(ways.items())[:: 1 if number % 2 else -1]:
            taken, norms[way] = layer.step(experts, products)
            seconds[way] += [taken] if number else []
        if max(norms.values()) > (1 + TOLERANCE) * min(norms.values()):
            raise ValueError(f"all ways must compute the same; norms of outputs and gradients are {norms}")
    middle = {way: median(of) for way, of in seconds.items()}
    best = min((way for way in ways if way != OURS), key=middle.__getitem__)
    ratios = [other / own for other, own in zip(seconds[best], seconds[OURS], strict=True)]
    return {
        **asdict(sizes),
        "products": chosen,
        "ways": {
            way: {"ms": round(of * 1e3, 2), "gflops_per_s": round(layer.flops / of / 1e9, 1)}
            for way, of in middle.items()
        },
        "best_other": best,
        "ratio": round(median(ratios), 3),
        "ratio_of_rounds": [round(ratio, 3) for ratio in ratios],
        "wanted": WANTED,
        "is_met": median(ratios) >= WANTED,
    }


class _Layer:
    """Return experts with random weights, and their tokens: some experts have several times as many as others."""

    def __init__(self, sizes: Sizes) -> None:
        random = torch.Generator().manual_seed(0)
        self.ours, self.grouped = (_experts(sizes, Kernels(experts=way)) for way in ("turns", "grouped"))
        self.megatrons = _megatrons(sizes)
        for name in ("linear_fc1", "linear_fc2"):
            weight = getattr(self.ours, name)
            weight.data.normal_(0, 0.05, generator=random)
            getattr(self.grouped, name).data.copy_(weight)
            for expert, of_expert in zip(self.megatrons.local_experts, weight, strict=True):
                getattr(expert, name).weight.data.copy_(of_expert)
        for experts in (self.ours, self.grouped, self.megatrons):
            for parameter in experts.parameters():
                parameter.main_grad = torch.zeros_like(parameter)
        likely = 0.2 + torch.rand(sizes.num_experts, generator=random)
        chosen = torch.multinomial(likely.expand(sizes.num_tokens, -1), sizes.top_k, generator=random)
        self.counts = torch.bincount(chosen.flatten(), minlength=sizes.num_experts)
        self.tokens, self.shares, self.grad = (
            torch.rand(sizes.num_tokens * sizes.top_k, *width, generator=random)
            for width in ((sizes.hidden_size,), (), (sizes.hidden_size,))
        )
        self.flops = 18.0 * len(self.tokens) * sizes.hidden_size * sizes.ffn_hidden_size

    def step(self, experts: Module, products: str) -> tuple[float, float]:
        """Return the processor seconds, and the norm of outputs and gradients."""
        tokens, shares = (one.clone().requires_grad_() for one in (self.tokens, self.shares))
        weights: list[Any] = list(experts.parameters())
        for weight in weights:
            weight.main_grad.zero_()
            weight.grad_added_to_main_grad = False
        with computing_with(products):
            start = time.process_time()
            out = experts(tokens, self.counts, shares)[0]
            torch.autograd.backward(out, self.grad)
            for weight in weights:  # like megatron's hook
                if not weight.grad_added_to_main_grad:
                    weight.main_grad.add_(weight.grad)
                weight.grad = None
            seconds = time.process_time() - start
        parts = [out.detach(), tokens.grad, shares.grad, *(weight.main_grad for weight in weights)]
        return seconds, math.hypot(*(float(part.double().norm()) for part in parts if part is not None))


def _experts(sizes: Sizes, kernels: Kernels) -> Experts:
    return Experts(sizes.num_experts, _config(sizes, kernels), pg_collection=get_default_pg_collection())


def _megatrons(sizes: Sizes) -> SequentialMLP:
    linear = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
    parts = MLPSubmodules(linear_fc1=linear[0], linear_fc2=linear[1], activation_func=SwiGLU)
    return SequentialMLP(sizes.num_experts, _config(sizes), parts, pg_collection=get_default_pg_collection())


def _config(sizes: Sizes, kernels: Kernels = PLAIN) -> PolicyTransformerConfig:
    policy = parse_policy_config(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 8,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.ffn_hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 8,
            "rms_norm_eps": 1e-6,
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.top_k,
            "moe_intermediate_size": sizes.ffn_hidden_size,
            "norm_topk_prob": True,
        }
    )
    return transformer_config(policy, dtype=torch.float32, init_method=lambda weight: weight, kernels=kernels)
