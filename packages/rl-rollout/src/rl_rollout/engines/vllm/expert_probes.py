"""Verifies experts in kernels of unknown layout: runs each expert alone, with forced ids, to check its three tensors.

An expert computes down @ (silu(gate @ x) * (up @ x)). It is run with each unit input, so that each answer depends on
one column of gate and of up, and with a few dense inputs. A wrong element of gate or up changes one answer of the first
kind in all outputs, which are summed with random signs. A wrong element of down changes one output of each answer of
the second kind. Either change is about 1 / sqrt(width) of the answer, which the kernel rounds.
docs/decisions/0043-mixtures.md lists the errors that stay undetected.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from rl_core.data import FloatArray
from rl_core.weights import tensor_checksum

NUM_DENSE = 4
"""Number of dense inputs, which reach every element of down."""

NUM_SUMS = 4
"""Number of sums with random signs over an answer's outputs. In a single sum, a change may cancel out."""

NOISE = 6.0
"""Maximum deviation of an answer, in standard roundings. A kernel that rounds after each step stays below 3."""

Ask = Callable[[torch.Tensor], torch.Tensor]
"""Maps [N, hidden] inputs in the engine's dtype to one expert's outputs."""


class Answers(NamedTuple):
    """An expert's answers.

    Attributes:
        sums: [hidden, NUM_SUMS], for each unit input.
        dense: [NUM_DENSE, hidden], for the dense inputs.
    """

    sums: torch.Tensor
    dense: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAnswers:
    """The expected answers of an expert, with their rounding error.

    Attributes:
        step: Size of the inputs.
        noise: Standard rounding of the inner products, per answer.
    """

    step: float
    answers: Answers
    noise: Answers
    dtype: torch.dtype

    def matches(self, ask: Ask) -> bool:
        """Return True if the answers match within rounding."""
        inputs, signs = _questions(self.answers.dense.shape[1], self.dtype, self.answers.sums.device)
        outputs = ask(inputs * self.step).float()
        alone, dense = outputs[:-NUM_DENSE], outputs[-NUM_DENSE:]
        found = Answers(alone @ signs.T, dense)
        tiny, unit = torch.finfo(self.dtype).smallest_normal, torch.finfo(self.dtype).eps / 2
        own = Answers(alone.norm(dim=1, keepdim=True), dense)  # rounded once more on output
        return all(
            bool(((live - expected).abs() <= NOISE * (noise + unit * last.abs().clamp(min=tiny))).all())
            for live, expected, noise, last in zip(found, self.answers, self.noise, own, strict=True)
        )


def expected_answers(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> ExpectedAnswers:
    """Return the expected answers of an expert with these tensors, complete or a rank's part.

    Args:
        gate: [width, hidden], in the engine's dtype.
        up: Same as gate.
        down: [hidden, width].
    """
    dtype = gate.dtype
    inputs, signs = _questions(gate.shape[1], dtype, gate.device)
    gate, up, down = gate.float(), up.float(), down.float()
    size = gate.square().mean().sqrt().log2().nan_to_num(0, 0, 0)
    step = 2.0 ** -round(float(size))  # silu is nonlinear where gate's outputs are about 1
    dense_inputs = inputs[-NUM_DENSE:].float() * step
    inner = torch.cat([silu(gate.T * step) * (up.T * step), silu(dense_inputs @ gate.T) * (dense_inputs @ up.T)])
    mixed = signs @ down
    limits = torch.finfo(dtype)
    unit = limits.eps / 2 + 2**-24 * math.sqrt(max(gate.shape))  # sums are kept in float32
    alone, dense = inner[:-NUM_DENSE], inner[-NUM_DENSE:]
    spread = inner.abs().clamp(min=limits.smallest_normal).square()
    return ExpectedAnswers(
        step=step,
        answers=Answers(alone @ mixed.T, dense @ down.T),
        noise=Answers(
            (spread[:-NUM_DENSE] @ mixed.square().T).sqrt() * unit,
            (spread[-NUM_DENSE:] @ down.square().T).sqrt() * unit,
        ),
        dtype=dtype,
    )


class AskedExpert:
    """One rank's part of a probed expert: the tensors that arrived, and the kernel's matrices at the last proof.

    Attributes:
        probes: This rank's rows of each tensor's probe, as the tensors arrived.
    """

    def __init__(self) -> None:
        """Start without tensors."""
        self.probes: dict[str, FloatArray] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._sums: dict[str, str] = {}
        self._expected: ExpectedAnswers | None = None
        self._proven: dict[str, tuple[str, str]] = {}

    def arrive(self, projection: str, part: torch.Tensor, probe: FloatArray, order: Sequence[str]) -> None:
        """Store one of its tensors until the others arrive.

        Args:
            projection: Its name in the checkpoint.
            part: This rank's part, in the engine's dtype and on its device.
            probe: This rank's rows of its probe.
            order: Names of gate, up and down.
        """
        self.probes[projection], self._sums[projection] = probe, tensor_checksum(part)
        self._parts[projection] = part
        if len(self._parts) == len(order):
            self._expected = expected_answers(*(self._parts.pop(name) for name in order))

    def wrong(self, ask: Ask, held: Mapping[str, str]) -> set[str]:
        """Return the names of the tensors that the live expert does not serve; all if its answers are wrong.

        A matrix is stale if its bits equal those of the last proof although another tensor has arrived, however small
        the difference.

        Args:
            ask: Runs the live expert.
            held: Checksum of the kernel's matrix for each tensor, in whatever layout.
        """
        if self._expected is None or not self._expected.matches(ask):
            return set(held)
        pairs = {name: (self._sums[name], held[name]) for name in held}
        stale = {
            name for name, (arrived, kept) in self._proven.items() if kept == held[name] and arrived != self._sums[name]
        }
        self._proven |= {name: pair for name, pair in pairs.items() if name not in stale}
        return stale


def why_not_asked(layer: Any) -> str | None:
    """Return why a layer's experts cannot be run one by one; None if they can."""
    method = layer.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return "is not known to support updates"
    if method.unquantized_backend is UnquantizedMoeBackend.MOONEP:
        return "cannot load weights again"
    if method.moe_kernel is None or method.is_monolithic:
        return "chooses experts itself, so none can be run alone"
    if layer.activation is not MoEActivation.SILU or method.moe.has_bias:
        return f"computes more than products and silu: {layer.activation}, or biases"
    return None


def ask_of(layer: Any, expert: int) -> Ask:
    """Return a function that runs one expert of a live layer with its kernel, in batches of at most max_num_tokens."""
    config, method = layer.moe_config, layer.quant_method

    def ask(inputs: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(inputs, (0, config.hidden_dim - inputs.shape[1]))
        outputs = []
        for part in torch.split(padded, config.max_num_tokens):
            ids = torch.full((len(part), 1), expert, device=part.device, dtype=method.topk_indices_dtype or torch.int32)
            weights = torch.ones(ids.shape, device=part.device)
            outputs.append(method.apply(layer, part, weights, ids, None, None)[:, : inputs.shape[1]].clone())
        return torch.cat(outputs)

    return ask


@lru_cache(maxsize=2)
def _questions(hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [hidden + NUM_DENSE, hidden] inputs, and [NUM_SUMS, hidden] signs."""
    generator = torch.Generator().manual_seed(hidden)
    dense = torch.randn(NUM_DENSE, hidden, generator=generator) / math.sqrt(hidden)
    signs = torch.randint(2, (NUM_SUMS, hidden), generator=generator) * 2.0 - 1
    return torch.cat([torch.eye(hidden), dense]).to(device, dtype), signs.to(device)
