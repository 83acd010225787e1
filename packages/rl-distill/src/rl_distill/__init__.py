"""Learners and objectives for reinforcement learning and distillation of language models.

`rl_distill.objectives` is pure math on tensors, `rl_distill.learner` the protocol, and `rl_distill.megatron.learner`
the learner. This module imports neither the learner nor torch, so settings can nest the options cheaply.
"""

from rl_distill.algorithms import ALGORITHMS, Algorithm
from rl_distill.architecture.lora_targets import adapted_modules, adapter_size
from rl_distill.architecture.memory import kept_activations, rank_memory, step_memory
from rl_distill.architecture.policy_config import (
    ModelBackend,
    PolicyConfig,
    parse_policy_config,
    read_policy_config,
    refuse_quantized,
)
from rl_distill.architecture.tensor_shapes import count_parameters, forward_flops, keeps_state
from rl_distill.options import AdamOptions, LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.parallel_layout import check_layout, check_learner, check_ranks, teacher_layout

__all__ = [
    "ALGORITHMS",
    "AdamOptions",
    "Algorithm",
    "LearnerOptions",
    "LoraOptions",
    "ModelBackend",
    "ParallelOptions",
    "PolicyConfig",
    "adapted_modules",
    "adapter_size",
    "check_layout",
    "check_learner",
    "check_ranks",
    "count_parameters",
    "forward_flops",
    "keeps_state",
    "kept_activations",
    "parse_policy_config",
    "rank_memory",
    "read_policy_config",
    "refuse_quantized",
    "step_memory",
    "teacher_layout",
]
