"""This project's Megatron learner in benchmarks/lora.py, with an adapter or with all weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from _lora_workload import ADAPTER, OURS, POLICY, PRESETS, RANKS
from our_learner import Ours

from rl_distill import LoraOptions
from rl_distill.megatron.learner import MegatronLearner


def opened(folder: Path, preset: str, system: str, *, recompute: bool) -> Ours:
    """The learner of a system."""
    make: Callable[..., MegatronLearner] = MegatronLearner
    if system == OURS:
        make = partial(MegatronLearner, lora=LoraOptions(rank=RANKS[preset], path=folder / ADAPTER))
    settings = {"products": "torch", "recompute": "full" if recompute else "none"}
    return Ours(folder / POLICY, PRESETS[preset], make, **settings)
