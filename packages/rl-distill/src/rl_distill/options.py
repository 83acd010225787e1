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
"""Parts of a layer, by Megatron's names."""
DEFAULT_RECOMPUTED = ("layernorm",)
KernelChoice = Literal["auto", "plain", "fused", "transformer_engine"]
KERNELS = ("auto", "plain", "fused", "transformer_engine")
PRODUCTS = ("auto", "torch", "onednn")
SERVINGS = ("adapter", "merged")
MAX_ALPHA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """Optimizer, precision, memory and kernels of a learner.

    Attributes:
        learning_rate: Peak learning rate.
        warmup_steps: Steps of linear warm-up from 0.
        decay_steps: Step at which the learning rate reaches min_learning_rate; none keeps the peak.
        decay: Shape of the decay from the end of the warm-up to decay_steps: "linear" or "cosine".
        min_learning_rate: Learning rate from decay_steps on.
        betas: Adam's beta1 and beta2.
        eps: Adam's epsilon.
        weight_decay: Decoupled weight decay.
        clip_grad: Maximum global gradient norm; 0 disables clipping.
        micro_batch_tokens: Maximum tokens per micro-batch, for each rank that shares its tokens (`parallel.context`). A
            longer trajectory gets a micro-batch of its own.
        shared_prefix_tokens: Compute a prefix that rows of one prompt share only once if it has at least this many
            tokens. Results change only by rounding. 0 computes every row on its own, and so do GPUs in float32.
        products: Library for float32 matrix products on CPUs: "torch" (MKL), "onednn", or "auto", which measures both
            at the start of a run and keeps the faster.
        dtype: Parameter dtype: "float32", or "bfloat16" with float32 master weights.
        recompute: "none" keeps all activations. "selective" recomputes those of `recompute_modules` in the backward
            pass; try it first when memory is short. "full" recomputes every layer's; use it when selective does not
            save enough.
        recompute_modules: Parts of a layer to recompute, by Megatron's names: "layernorm" (the norms before attention
            and MLP), "core_attn" (attention; saves much only with plain kernels), "mlp" and "moe" (a whole MLP or
            mixture of experts, with the norm before it). Start with parts that hold much memory and cost little to
            compute.
        kernels: "auto" is "fused" on GPUs and "plain" on CPUs. "plain" is the CPU's kernels; use it on a GPU to compare
            results. "fused" is a GPU's kernels, such as flash attention and grouped matrix products for experts.
            "transformer_engine" also uses that library's linear layers and norms; it must be installed, and cannot
            train adapters.
        overlap_grad_reduce: Reduce gradients over the data-parallel ranks during the backward pass. Use it with two or
            more such ranks when steps wait for the reduction.
        overlap_param_gather: Gather the weights that a distributed optimizer updated during the next forward pass. Use
            it when steps wait for the gather. Needs `parallel.distributed_optimizer` and `overlap_grad_reduce`.
        offload_optimizer: Keep Adam's moments and the float32 master weights in host memory between steps. Use it when
            they do not fit on the GPU beside the activations. Costs two copies per step; has no effect on CPUs.
        num_threads: Threads of a learner on CPUs; none keeps torch's setting.
        seed: Seed of dropout, and of weights that are not loaded.
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
        """Yield a message for each invalid option, with the option, its allowed values and its value."""
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
            yield f"betas must be two numbers >= 0 and < 1; found {betas!r}."
        steps = (self.warmup_steps, self.decay_steps)
        if all(isinstance(number, int) for number in steps) and self.warmup_steps >= (self.decay_steps or math.inf):
            yield (
                f"decay_steps = {self.decay_steps} is the step at which the rate reaches min_learning_rate; it must "
                f"be above warmup_steps = {self.warmup_steps}."
            )

    def _recompute_problems(self) -> Iterator[str]:
        modules: object = self.recompute_modules
        if not isinstance(modules, tuple | list) or not modules or not set(modules) <= set(RECOMPUTED_MODULES):
            yield f"recompute_modules must be some of {', '.join(RECOMPUTED_MODULES)}; found {modules!r}."
        elif self.recompute in ("none", "full") and tuple(modules) != DEFAULT_RECOMPUTED:
            yield (
                f'recompute_modules = {list(modules)} has no effect with recompute = "{self.recompute}". Set '
                'recompute = "selective", or omit recompute_modules.'
            )

    def check(self) -> None:
        """Check the options.

        Raises:
            SettingsError: An option is invalid; the message lists all of `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """A LoRA adapter, trained instead of the policy's weights, which stay frozen (Hu et al. 2021).

    Attributes:
        rank: Rank of the adapter; 0 trains all weights. LoRA usually needs ten times the learning rate of full
            training.
        alpha: The adapter's output is scaled by alpha / rank; none uses twice the rank.
        rslora: Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023).
        dropout: Dropout on the adapter's inputs during training.
        target_modules: Matrices that get an adapter: "all-linear" (every linear layer of a dense policy, the attention
            of a mixture of experts), or shell patterns that match the end of Hugging Face names, such as "q_proj",
            "self_attn.*" or "layers.1?.mlp.*".
        serving: What engines receive: only the "adapter", which they apply to the base weights they keep, or "merged",
            all weights with the adapter merged in. Merged weights take longer to send and decode as fast as a model
            without an adapter.
        path: Folder of an adapter in peft's format to start from; none starts from one with no effect.
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
        """`alpha`, or twice the rank if it is None."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scaling(self) -> float:
        """Factor of the product `B @ A`."""
        return self.alpha_in_use / (math.sqrt(self.rank) if self.rslora else self.rank)

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid option; see `LearnerOptions.problems`."""
        yield from not_whole(self, {"rank": 0})
        yield from not_among(self, {"serving": SERVINGS, "rslora": (False, True)})
        if self.alpha is not None:
            yield from not_numbers(self, ("alpha",), above=0.0)
            if is_number(self.alpha) and self.alpha >= MAX_ALPHA:
                yield f"alpha must be below {MAX_ALPHA:g}; found {self.alpha:g}."
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            yield f"dropout must be a number >= 0 and < 1; found {self.dropout!r}."
        patterns: object = self.target_modules
        if not isinstance(patterns, tuple | list) or not patterns or not all(isinstance(one, str) for one in patterns):
            yield f'target_modules must be a list of patterns, e.g. ["all-linear"]; found {patterns!r}.'
        path: object = self.path
        if not isinstance(path, Path | None):
            yield f"path must be a Path, or None; found {path!r}."

    def check(self) -> None:
        """Check the options.

        Raises:
            SettingsError: An option is invalid; the message lists all of `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How the policy is sharded over ranks; the data-parallel size is `ranks` divided by the other sizes.

    Attributes:
        ranks: Number of training processes; each has its own GPU if there are GPUs.
        tensor: Tensor-parallel size: ranks that share each weight matrix.
        pipeline: Pipeline-parallel size: stages of layers.
        virtual_pipeline: Chunks of layers per pipeline stage; above 1 uses the interleaved schedule.
        context: Context-parallel size: ranks that share the tokens of each micro-batch.
        expert: Expert-parallel size: ranks that share the experts of a mixture.
        expert_tensor: Tensor-parallel size of each expert, which divides `tensor`; none uses `tensor`.
        sequence: Sequence parallelism: also shard activations between the matrices over the tensor-parallel ranks. A
            mixture of experts with tensor > 1 needs it.
        distributed_optimizer: Shard Adam's moments and the float32 master weights over the data-parallel ranks.
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
        """Yield a message for each size that is invalid in any layout; `parallel_layout` checks divisibility."""
        sizes = ("ranks", "tensor", "pipeline", "virtual_pipeline", "context", "expert")
        yield from not_whole(self, dict.fromkeys(sizes, 1))
        yield from not_whole(self, {"expert_tensor": 1}, or_none=True)
        yield from not_among(self, {"sequence": (False, True), "distributed_optimizer": (False, True)})

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.ranks // (self.tensor * self.pipeline * self.context)
