"""Checks and calculations for an optimizer step that both learners share."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_core.data import Batch
from rl_core.errors import NotReadyError, SettingsError, ShapeError
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.checkpoints.checkpoint import DTYPES, PolicySource
from rl_distill.options import LearnerOptions


def open_policy(policy: Path | str | Mapping[str, Any], *, is_critic: bool = False) -> PolicySource:
    """Read a policy's configuration from a Hugging Face folder, or from config.json content for random weights.

    Args:
        policy: The folder, or the content of config.json.
        is_critic: Also accept a classifier with the same layers, such as a saved critic or a reward model.

    Raises:
        DataError: There is no valid config.json.
        SettingsError: The architecture is not supported.
    """
    if isinstance(policy, str):
        policy = Path(policy)
    policy_dir = policy if isinstance(policy, Path) else None
    config_json = read_policy_config(policy) if isinstance(policy, Path) else dict(policy)
    if is_critic:
        names = [str(name) for name in config_json.get("architectures") or []]
        config_json["architectures"] = [re.sub("For(Token|Sequence)Classification$", "ForCausalLM", n) for n in names]
    return PolicySource(config_json=config_json, config=parse_policy_config(config_json), policy_dir=policy_dir)


def parameter_dtype(options: LearnerOptions) -> torch.dtype:
    """Return the torch dtype of the parameters; the options must be checked."""
    return DTYPES[options.dtype]


def check_trainable(batch: Batch) -> None:
    """Check that at least one token of the batch trains.

    Raises:
        ShapeError: loss_weights is missing, all zero, or nonzero outside loss_mask.
    """
    if "loss_weights" not in batch:
        raise ShapeError(f"train_step needs the column 'loss_weights'; the batch has {sorted(batch.names)}.")
    weights = batch.ragged("loss_weights").values
    if not weights.any():
        raise ShapeError("no token of the batch trains: all loss_weights are 0. Skip the step.")
    if "loss_mask" in batch and (outside := np.flatnonzero((weights != 0) & ~batch.ragged("loss_mask").values)).size:
        row = int(np.searchsorted(batch.ragged("loss_mask").offsets, outside[0], side="right")) - 1
        raise ShapeError(
            f"loss_weights must be 0 where loss_mask is False; found {outside.size} tokens where they are not, first "
            f"in row {row}. Compute loss_weights from loss_mask, as with_loss_weights does."
        )


def clip_scale(grad_norm: float, clip_grad: float) -> float:
    """Return the factor for the gradients; 1 if their norm is within the limit or clip_grad is 0."""
    return min(1.0, clip_grad / (grad_norm + 1.0e-6)) if clip_grad > 0.0 else 1.0


def check_temperature(temperature: float) -> None:
    """Check that a temperature is above 0.

    Raises:
        SettingsError: It is not above 0.
    """
    if not temperature > 0:
        raise SettingsError(f"temperature must be above 0; found {temperature}. The learner scores sampled tokens.")


def check_open(is_open: bool) -> None:
    """Check that a learner is open.

    Raises:
        NotReadyError: It was closed.
    """
    if not is_open:
        raise NotReadyError("the learner was closed; create a new one.")
