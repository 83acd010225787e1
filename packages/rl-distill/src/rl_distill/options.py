"""Options of learners; imports without torch, so that settings can nest them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from rl_core.errors import SettingsError
from rl_core.record_fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, settings_record

DTYPES = ("float32", "bfloat16")
RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe"]
"""Parts of a layer, by Megatron's names."""
DEFAULT_RECOMPUTED: tuple[RecomputedModule, ...] = ("layernorm",)
Algorithm = Literal["adam", "muon"]
KernelChoice = Literal["auto", "plain", "fused", "transformer_engine"]
MAX_ALPHA = 1e9
BelowOne = Annotated[float, Ge(0), Lt(1)]


@settings_record
class LearnerOptions:
    """Optimizer, precision, memory and kernels of a learner.

    Attributes:
        learning_rate: Peak learning rate.
        algorithm: "adam" (AdamW), or "muon" for the matrices of layers, and AdamW for embeddings, head, norms and
            routers. One learning rate and weight decay serve both.
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
        image_folder: Folder with the images of rows (`rl_core.images`), which ranks read; none refuses rows with
            images. Trainers set it.
        trains_vision: Also train the vision tower and projector of a policy with images, which otherwise stay frozen.
        seed: Seed of dropout, and of weights that are not loaded.
    """

    learning_rate: PositiveFloat = 1e-6
    algorithm: Algorithm = "adam"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    decay: Literal["linear", "cosine"] = "linear"
    min_learning_rate: NonNegativeFloat = 0.0
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0
    micro_batch_tokens: PositiveInt = 8192
    shared_prefix_tokens: NonNegativeInt = 16
    products: Literal["auto", "torch", "onednn"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: Annotated[tuple[RecomputedModule, ...], MinLen(1)] = DEFAULT_RECOMPUTED
    kernels: KernelChoice = "auto"
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    offload_optimizer: bool = False
    num_threads: PositiveInt | None = None
    image_folder: Path | None = None
    trains_vision: bool = False
    seed: NonNegativeInt = 0

    def problems(self) -> Iterator[str]:
        """Yield a message for each impossible combination."""
        modules = list(self.recompute_modules)
        if self.recompute != "selective" and self.recompute_modules != DEFAULT_RECOMPUTED:
            yield (
                f'recompute_modules = {modules} has no effect with recompute = "{self.recompute}". Set '
                'recompute = "selective", or omit recompute_modules.'
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield "overlap_param_gather needs overlap_grad_reduce = true."
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            yield (
                f"decay_steps = {self.decay_steps} is the step at which the rate reaches min_learning_rate; it must "
                f"be above warmup_steps = {self.warmup_steps}."
            )

    def check(self) -> None:
        """Check the combinations.

        Raises:
            SettingsError: The message lists all of `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))


@settings_record
class AdamOptions:
    """Adam's settings of one optimizer step.

    Attributes:
        learning_rate: Learning rate.
        betas: Beta1 and beta2.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay; norms and biases have none.
        clip_grad: Maximum global gradient norm; 0 disables clipping.
    """

    learning_rate: NonNegativeFloat
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 0.0


@settings_record
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

    rank: NonNegativeInt = 0
    alpha: Annotated[float, Gt(0), Lt(MAX_ALPHA)] | None = None
    rslora: bool = False
    dropout: BelowOne = 0.0
    target_modules: Annotated[tuple[str, ...], MinLen(1)] = ("all-linear",)
    serving: Literal["adapter", "merged"] = "adapter"
    path: Path | None = None

    @property
    def alpha_in_use(self) -> float:
        """`alpha`, or twice the rank if it is None."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scaling(self) -> float:
        """Factor of the product `B @ A`."""
        return self.alpha_in_use / self._divisor

    @property
    def _divisor(self) -> float:
        return math.sqrt(self.rank) if self.rslora else float(self.rank)

    def padded_from(self, rank: int) -> "LoraOptions":
        """Return the options of an adapter of a lower rank that is padded with zeros to this rank, scaled as before."""
        return self if rank == self.rank else replace(self, alpha=replace(self, rank=rank).scaling * self._divisor)


@settings_record
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
        shard_weights: Shard weights, gradients, Adam's moments and float32 master weights over the data-parallel ranks
            (FSDP). A layer's weights are gathered when it runs. Only for models that transformers' class computes.
    """

    ranks: PositiveInt = 1
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt | None = None
    sequence: bool = False
    distributed_optimizer: bool = False
    shard_weights: bool = False

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.ranks // (self.tensor * self.pipeline * self.context)
