"""This project's Megatron learner as a side of benchmarks/learner.py.

SHARED_PREFIX_TOKENS sets what it shares, and POLICY_BACKEND what computes the model.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from _learner_bound import bound, profiled_seconds, work
from _learner_experts import SIZES, measure
from _learner_protocol import Outcome, serve
from _learner_workload import OPTIMIZER, Preset, Rows

from rl_core.data import Batch, Ragged, RowKey
from rl_distill.architecture.policy_config import ModelBackend
from rl_distill.learner import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective


class Ours:
    """The learner, called as a trainer does."""

    def __init__(
        self, policy: Path, preset: Preset, make: Callable[..., MegatronLearner] = MegatronLearner, **settings: Any
    ) -> None:
        """Build it.

        Args:
            policy: Folder of the weights.
            preset: Sizes of policy and batches.
            make: Builds the learner from the folder and the options.
            **settings: Further options.
        """
        options = LearnerOptions(
            **OPTIMIZER,
            dtype=preset.dtype,
            micro_batch_tokens=preset.budget,
            num_threads=torch.get_num_threads(),
            shared_prefix_tokens=int(os.environ.get("SHARED_PREFIX_TOKENS", LearnerOptions().shared_prefix_tokens)),
            **settings,
        )
        self._learner = make(policy, options)
        self._min_shared = self._learner._min_shared
        self._vocab_size = int(preset.policy["vocab_size"])

    def repack(self, *, tokens: int, shares: bool) -> None:
        """Change the micro-batches from the next step on, without rebuilding the model.

        Args:
            tokens: Maximum tokens of a micro-batch.
            shares: Compute shared prefixes once.
        """
        learner = self._learner
        learner._options = replace(learner._options, micro_batch_tokens=tokens)
        learner._min_shared = self._min_shared if shares else 0

    def close(self) -> None:
        """Free the model."""
        self._learner.close()

    def step(self, rows: Rows) -> Outcome:
        """Run one optimizer step without padding; shared prefixes are computed once."""
        result = self._learner.train_step(batch_of(rows), supervised_objective)
        return Outcome(loss=result.loss, grad_norm=result.grad_norm, num_computed_tokens=result.computed_tokens)

    def experts(self, preset: str, *, rounds: int) -> list[dict[str, Any]]:
        """Measure a layer's experts, computed in several ways."""
        return [measure(sizes, rounds=rounds) for sizes in SIZES[preset]]

    def bound(self, rows: Rows) -> float:
        """Return the maximum speed-up by sharing, measured with one more step."""
        seconds = profiled_seconds(lambda: self.step(rows), vocab_size=self._vocab_size)
        batch, min_shared = batch_of(rows), LearnerOptions().shared_prefix_tokens
        parts = {least: work(batch, rows, min_shared=least) for least in (0, min_shared)}
        return bound(seconds, unshared=parts[0], shared=parts[min_shared])


def batch_of(rows: Rows) -> Batch:
    """Return the rows as a learner's batch."""
    mask = rows.loss_mask
    values = {
        "input_ids": rows.input_ids,
        "loss_mask": mask,
        "loss_weights": (mask / mask.sum()).astype(np.float32),
    }
    keys = [RowKey(f"prompt{prompt}", row, 0) for row, prompt in enumerate(rows.prompts)]
    return Batch(keys, {name: Ragged(column, rows.offsets) for name, column in values.items()})


if __name__ == "__main__":
    learner = partial(MegatronLearner, backend=cast("ModelBackend", os.environ.get("POLICY_BACKEND", "auto")))
    sys.exit(serve(partial(Ours, make=learner), packages=("megatron-core", "torch")))
