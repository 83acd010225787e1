"""Learning: objectives, the Megatron learner, the reference learner.

`rl_distill.objectives` is pure math on tensors, `rl_distill.learner` the protocol, `rl_distill.megatron.learner` and
`rl_distill.torch_learner` the learners. This module loads neither them nor torch, so that settings nest options.
"""

from rl_distill.options import LearnerOptions, ParallelOptions

__all__ = ["LearnerOptions", "ParallelOptions"]
