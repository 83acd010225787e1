"""Options of learners; imports without torch, so that settings can nest them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """How a learner trains.

    Attributes:
        learning_rate: Peak learning rate.
        warmup_steps: Steps of linear warm-up from 0.
        decay_steps: Steps of linear decay to 0 that end at this step; None keeps the rate constant.
        betas: Adam's.
        eps: Adam's.
        weight_decay: Decoupled weight decay.
        clip_grad: Largest global gradient norm; 0 turns clipping off.
        micro_batch_tokens: Most tokens of a micro-batch; a longer trajectory gets its own.
        dtype: Parameters in "float32" or "bfloat16" (with float32 master weights).
        num_threads: Threads of a CPU learner; None leaves torch's setting.
        seed: Of the initial weights, where none are loaded, and of dropout.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    micro_batch_tokens: int = 8192
    dtype: str = "float32"
    num_threads: int | None = None
    seed: int = 0
