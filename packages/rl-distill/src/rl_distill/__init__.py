"""Learning: objectives, the Megatron learner, the reference learner.

`rl_distill.objectives` is pure math on tensors, `rl_distill.learner` the protocol, `rl_distill.megatron.learner` and
`rl_distill.torch_learner` the learners. This module loads neither them nor torch, so that settings nest options.
"""

from rl_distill.flops import forward_flops
from rl_distill.lora_targets import adapted_modules, adapter_size
from rl_distill.model_memory import rank_memory
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.parallel_layout import check_layout, check_ranks, teacher_layout
from rl_distill.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.tensor_shapes import count_parameters

__all__ = [
    "LearnerOptions",
    "LoraOptions",
    "ParallelOptions",
    "PolicyConfig",
    "adapted_modules",
    "adapter_size",
    "check_layout",
    "check_ranks",
    "count_parameters",
    "forward_flops",
    "parse_policy_config",
    "rank_memory",
    "read_policy_config",
    "teacher_layout",
]
