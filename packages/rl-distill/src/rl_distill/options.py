"""Options of learners; imports without torch, so that settings can nest them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_core.errors import SettingsError
from rl_distill.option_values import is_number, not_among, not_numbers, not_whole

DTYPES = ("float32", "bfloat16")
DECAYS = ("linear", "cosine")
RECOMPUTES = ("none", "selective", "full")
RECOMPUTED_MODULES = ("core_attn", "layernorm", "mlp", "moe")
"""Parts of a layer, by megatron's names."""
DEFAULT_RECOMPUTED = ("layernorm",)
KernelChoice = Literal["auto", "plain", "fused", "transformer_engine"]
KERNELS = ("auto", "plain", "fused", "transformer_engine")
PRODUCTS = ("auto", "torch", "onednn")
SERVINGS = ("adapter", "merged")
MAX_ALPHA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """How a learner trains.

    Attributes:
        learning_rate: Peak learning rate.
        warmup_steps: Steps of linear warm-up from 0.
        decay_steps: Step at which the rate reaches min_learning_rate; None keeps the peak.
        decay: Way down from the warm-up's end to decay_steps: "linear" or "cosine".
        min_learning_rate: Rate at decay_steps and after.
        betas: Adam's.
        eps: Adam's.
        weight_decay: Decoupled weight decay.
        clip_grad: Largest global gradient norm; 0 turns clipping off.
        micro_batch_tokens: Most tokens of a micro-batch, for each rank that shares its tokens (`context`); a longer
            trajectory gets its own.
        shared_prefix_tokens: Rows of a prompt that begin with at least so many tokens alike compute them once, which
            changes results by rounding alone; 0 computes each row on its own. So do GPUs in float32.
        products: float32 matrix products on a CPU: "torch" (MKL's), "onednn", or "auto" for what is faster here, which
            a run measures at its start and keeps.
        dtype: Parameters in "float32" or "bfloat16" (with float32 master weights).
        recompute: "full" computes each layer's activations again in the backward pass: use it when memory is short.
            "selective" does so for `recompute_modules` alone: use it when that saves enough. "none" keeps them all.
        recompute_modules: Parts of a layer, by megatron's names. Begin with those that keep much and compute little.
            "layernorm" forgets what the norms before attention and MLP give. "core_attn" forgets what attention keeps,
            which is much only with plain kernels. "mlp" and "moe" forget all of an MLP, or of a mixture of experts,
            with the norm before it.
        kernels: "plain" uses a CPU's kernels; on a GPU, use it to compare results. "fused" uses a GPU's, such as flash
            attention and one product for all experts. "transformer_engine" also uses that library's matrices and norms;
            it must be installed, and no adapter can train. "auto" is "fused" on GPUs and "plain" on CPUs.
        overlap_grad_reduce: Sum gradients over the data-parallel ranks while the backward pass still runs. Use it with
            two or more such ranks, when steps wait for the sums.
        overlap_param_gather: Gather the weights that the ranks of a distributed optimizer have updated while the next
            forward pass runs. Use it when steps wait for them. It needs `parallel.distributed_optimizer` and
            `overlap_grad_reduce`.
        offload_optimizer: Keep Adam's moments and float32 master weights in the host's memory between steps. Use it
            when a GPU cannot hold them beside the activations. It costs two copies a step, and does nothing on CPUs.
        num_threads: Threads of a CPU learner; None leaves torch's setting.
        seed: Of the initial weights, where none are loaded, and of dropout.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    decay_steps: int | None = None
    decay: Literal["linear", "cosine"] = "linear"
    min_learning_rate: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    micro_batch_tokens: int = 8192
    shared_prefix_tokens: int = 16
    products: Literal["auto", "torch", "onednn"] = "auto"
    dtype: str = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[str, ...] = DEFAULT_RECOMPUTED
    kernels: KernelChoice = "auto"
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    offload_optimizer: bool = False
    num_threads: int | None = None
    seed: int = 0

    def problems(self) -> Iterator[str]:
        """What cannot be: each names the option, what it must be, and what it is."""
        yield from not_whole(self, {"warmup_steps": 0, "micro_batch_tokens": 1, "shared_prefix_tokens": 0, "seed": 0})
        yield from not_whole(self, {"decay_steps": 1, "num_threads": 1}, or_none=True)
        yield from not_numbers(self, ("learning_rate", "eps"), above=0.0)
        yield from not_numbers(self, ("min_learning_rate", "weight_decay", "clip_grad"), at_least=0.0)
        known = {"dtype": DTYPES, "decay": DECAYS, "recompute": RECOMPUTES, "products": PRODUCTS, "kernels": KERNELS}
        flags = ("overlap_grad_reduce", "overlap_param_gather", "offload_optimizer")
        yield from not_among(self, {**known, **dict.fromkeys(flags, (False, True))})
        yield from self._recompute_problems()
        if self.overlap_param_gather is True and self.overlap_grad_reduce is False:
            yield "overlap_param_gather needs overlap_grad_reduce = true."
        betas = self.betas
        if len(betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
            yield f"betas must be two numbers of at least 0 and below 1; found {betas!r}."
        steps = (self.warmup_steps, self.decay_steps)
        if all(isinstance(number, int) for number in steps) and self.warmup_steps >= (self.decay_steps or math.inf):
            yield (
                f"decay_steps = {self.decay_steps} is the step at which the rate reaches min_learning_rate; it must "
                f"come after warmup_steps = {self.warmup_steps}."
            )

    def _recompute_problems(self) -> Iterator[str]:
        modules: object = self.recompute_modules
        if not isinstance(modules, tuple | list) or not modules or not set(modules) <= set(RECOMPUTED_MODULES):
            yield f"recompute_modules must be some of {', '.join(RECOMPUTED_MODULES)}; found {modules!r}."
        elif self.recompute in ("none", "full") and tuple(modules) != DEFAULT_RECOMPUTED:
            yield (
                f'recompute_modules = {list(modules)} has no effect with recompute = "{self.recompute}". Set recompute '
                '= "selective", or leave out recompute_modules.'
            )

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            SettingsError: Has all of `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """A LoRA adapter, trained in the place of the policy's weights, which stay as they are (Hu et al. 2021).

    Attributes:
        rank: Rows of each A; 0 trains all weights. LoRA's usual learning rate is ten times full training's.
        alpha: The adapter's product is multiplied by alpha / rank; None takes twice the rank.
        rslora: Multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023).
        dropout: Share of each adapter's inputs that is left out in training.
        target_modules: Which matrices: "all-linear" (a mixture's attention, all of a dense policy's layers), or shell
            patterns of the ends of Hugging Face's names, such as "q_proj", "self_attn.*" or "layers.1?.mlp.*".
        serving: Whether engines are given the "adapter", beside weights that they keep, or all weights with the adapter
            "merged" into them: more to send, and as fast to decode as without.
        path: Folder of an adapter in peft's format to begin with; None begins with one that changes nothing.
    """

    rank: int = 0
    alpha: float | None = None
    rslora: bool = False
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)
    serving: Literal["adapter", "merged"] = "adapter"
    path: Path | None = None

    @property
    def alpha_in_use(self) -> float:
        """Alpha, twice the rank where none was given."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scaling(self) -> float:
        """What B @ A is multiplied by."""
        return self.alpha_in_use / (math.sqrt(self.rank) if self.rslora else self.rank)

    def problems(self) -> Iterator[str]:
        """What cannot be, as `LearnerOptions.problems`."""
        yield from not_whole(self, {"rank": 0})
        yield from not_among(self, {"serving": SERVINGS, "rslora": (False, True)})
        if self.alpha is not None:
            yield from not_numbers(self, ("alpha",), above=0.0)
            if is_number(self.alpha) and self.alpha >= MAX_ALPHA:
                yield f"alpha must be below {MAX_ALPHA:g}; found {self.alpha:g}."
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            yield f"dropout must be a number of at least 0 and below 1; found {self.dropout!r}."
        patterns: object = self.target_modules
        if not isinstance(patterns, tuple | list) or not patterns or not all(isinstance(one, str) for one in patterns):
            yield f'target_modules must be a list of patterns, such as ["all-linear"]; found {patterns!r}.'
        path: object = self.path
        if not isinstance(path, Path | None):
            yield f"path must be a Path, or None; found {path!r}."

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            SettingsError: Has all of `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How a policy is spread over ranks; data parallelism takes what the others leave of `ranks`.

    Attributes:
        ranks: Processes that train together; one GPU each, where there are GPUs.
        tensor: Ranks that share each weight matrix.
        pipeline: Stages of layers.
        virtual_pipeline: Chunks of layers on each stage; above 1 is the interleaved schedule.
        context: Ranks that share the tokens of each micro-batch.
        expert: Ranks that share the experts of a mixture.
        expert_tensor: Ranks that share each expert's matrices; None takes `tensor`.
        sequence: Also share the tokens between the matrices over the `tensor` ranks; a mixture of experts with
            tensor > 1 needs it.
        distributed_optimizer: Share Adam's moments and float32 weights over the data-parallel ranks.
    """

    ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False
    distributed_optimizer: bool = False

    def problems(self) -> Iterator[str]:
        """What no layout can have; `parallel_layout` says what must divide what."""
        sizes = ("ranks", "tensor", "pipeline", "virtual_pipeline", "context", "expert")
        yield from not_whole(self, dict.fromkeys(sizes, 1))
        yield from not_whole(self, {"expert_tensor": 1}, or_none=True)
        yield from not_among(self, {"sequence": (False, True), "distributed_optimizer": (False, True)})

    @property
    def data(self) -> int:
        """Ranks that each train on a part of the trajectories."""
        return self.ranks // (self.tensor * self.pipeline * self.context)
