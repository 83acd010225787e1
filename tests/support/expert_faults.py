"""Faults in the experts of a mixture served by a vLLM engine in this process."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

NUM_EXPERTS, NUM_LAYERS = 4, 2
FAULTS = ("swapped", "stale", "transposed", "one element")


class Fault:
    """A fault in the experts of one live layer, drawn by a number.

    Attributes:
        kind: A kind in FAULTS.
        named: Tensors that are wrong afterwards; for one element, the candidates.
    """

    def __init__(self, number: int, layer: int) -> None:
        self._draw, self._layer = random.Random(NUM_LAYERS * number + layer), layer
        self.kind = FAULTS[(number + layer) % len(FAULTS)]
        self._is_down = self.kind == "transposed" or self._draw.random() < 0.5
        self.named: set[str] = set()

    def before(self, worker: Any) -> None:
        """Record the weights before the update."""
        self._old = self._weight(worker).clone()

    def after(self, worker: Any) -> None:
        """Break the weights after the update."""
        weight, (one, other) = self._weight(worker), self._draw.sample(range(NUM_EXPERTS), 2)
        if self.kind == "swapped":
            weight[[one, other]] = weight[[other, one]]
            self._name([one, other])
        elif self.kind == "stale":
            weight.copy_(self._old)
            self._name(range(NUM_EXPERTS))
        elif self.kind == "transposed":
            isa = routed(worker)[self._layer].quant_method.moe_kernel.fused_experts.isa
            weight[one] = repacked(weight[one], isa, lambda tensor: tensor.T)
            self._name([one])
        else:
            element = self._draw.choice(weight[one].flatten().nonzero().flatten().tolist())  # padding is 0
            bits = weight[one].view(-1).view(torch.int16)
            bits[element * weight.itemsize // 2] ^= 1  # its lowest bit
            self._name([one])

    def _weight(self, worker: Any) -> torch.Tensor:
        layer = routed(worker)[self._layer]
        return (layer.w2_weight if self._is_down else layer.w13_weight).data

    def _name(self, experts: Iterable[int]) -> None:
        projections = ["down_proj"] if self._is_down else ["gate_proj", "up_proj"]
        prefix = f"model.layers.{self._layer}.mlp.experts"
        self.named = {f"{prefix}.{expert}.{name}.weight" for expert in experts for name in projections}


def routed(worker: Any) -> list[Any]:
    model = worker.worker.model_runner.get_model()
    return [module for module in model.modules() if type(module).__name__ == "RoutedExperts"]


def repacked(weight: torch.Tensor, isa: str, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a packed square matrix with a change to its plain form."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    from rl_rollout.engines.vllm.mixtures import _places

    plain = weight.take(_places(tuple(weight.shape), weight.dtype, isa).long())
    return cpu_prepack_moe_weight(change(plain).contiguous().unsqueeze(0), isa)[0]
