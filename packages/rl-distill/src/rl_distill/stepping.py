"""Checks and calculations for an optimizer step that both learners share."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_core.data import Batch, Ragged
from rl_core.errors import NotReadyError, SettingsError, ShapeError
from rl_distill.architecture.policy_config import (
    ModelBackend,
    PolicyConfig,
    parse_policy_config,
    read_policy_config,
    refuse_quantized,
)
from rl_distill.checkpoints.checkpoint import PolicySource
from rl_distill.options import AdamOptions, LearnerOptions
from rl_distill.prefixes import NUCLEUS, ROUTED_EXPERTS
from rl_distill.row_images import check_images

ResourceT = TypeVar("ResourceT")


def open_policy(
    policy: Path | str | Mapping[str, Any],
    *,
    is_critic: bool = False,
    backend: ModelBackend = "auto",
    trains_vision: bool = False,
) -> PolicySource:
    """Read a policy's configuration from a Hugging Face folder, or from config.json content for random weights.

    Args:
        policy: The folder, or the content of config.json.
        is_critic: Also accept a classifier with the same layers, such as a saved critic or a reward model.
        backend: What computes the model; see `parse_policy_config`.
        trains_vision: See `LearnerOptions`.

    Raises:
        DataError: There is no valid config.json.
        SettingsError: The architecture is not supported, or the weights are quantized.
    """
    if isinstance(policy, str):
        policy = Path(policy)
    policy_dir = policy if isinstance(policy, Path) else None
    config_json = read_policy_config(policy) if isinstance(policy, Path) else dict(policy)
    refuse_quantized(config_json)
    if is_critic:
        names = [str(name) for name in config_json.get("architectures") or []]
        config_json["architectures"] = [re.sub("For(Token|Sequence)Classification$", "ForCausalLM", n) for n in names]
    config = parse_policy_config(config_json, backend=backend)
    config = replace(config, trains_vision=trains_vision)
    return PolicySource(config_json=config_json, config=config, policy_dir=policy_dir)


def check_trainable(batch: Batch) -> None:
    """Check that at least one token of the batch trains.

    Raises:
        ShapeError: loss_weights is missing, all zero, or nonzero outside loss_mask.
    """
    check_loss_weights(batch, who="train_step")
    if not batch.ragged("loss_weights").values.any():
        raise ShapeError("no token of the batch trains: all loss_weights are 0. Skip the step.")


def check_loss_weights(batch: Batch, *, who: str) -> None:
    """Check that the batch has loss_weights, only inside its loss_mask.

    Args:
        batch: The batch.
        who: The method that needs them, for the message.

    Raises:
        ShapeError: loss_weights is missing, or nonzero outside loss_mask.
    """
    if "loss_weights" not in batch:
        raise ShapeError(f"{who} needs the column 'loss_weights'; the batch has {sorted(batch.names)}.")
    weights = batch.ragged("loss_weights").values
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


def check_open(resource: ResourceT | None) -> ResourceT:
    """Return what a learner computes with.

    Raises:
        NotReadyError: The learner was closed, so there is none.
    """
    if resource is None:
        raise NotReadyError("the learner was closed; create a new one.")
    return resource


def learning_rate_at(step: int, options: LearnerOptions) -> float:
    """Return the learning rate of a step: linear warm-up, then constant or decaying.

    With min_learning_rate 0, no step of the warm-up or decay has rate 0. In a warm-up over W steps, step s has the
    share s / W of the peak; in a linear decay that ends at step D, it has the share (D + 1 - s) / (D - W).

    Args:
        step: Optimizer step, from 1.
        options: Peak rate, warm-up and decay.
    """
    peak, lowest = options.learning_rate, options.min_learning_rate
    if step <= options.warmup_steps:
        return peak * step / options.warmup_steps
    if options.decay_steps is None:
        return peak
    span = max(1, options.decay_steps - options.warmup_steps)
    left = max(0.0, options.decay_steps + 1 - step) / span
    if options.decay == "cosine":
        left = 0.5 * (1.0 - math.cos(math.pi * min(1.0, left)))
    return lowest + (peak - lowest) * min(1.0, left)


def adam_at(step: int, options: LearnerOptions) -> AdamOptions:
    """Return Adam's settings of a step, from 1, with the scheduled learning rate."""
    return AdamOptions(
        learning_rate=learning_rate_at(step, options),
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
    )


def check_tokens(batch: Batch, config: PolicyConfig) -> None:
    """Check that rows fit the policy's positions, tokens its vocabulary, and a token's experts the policy.

    Raises:
        ShapeError: A check fails; the message names the row, the value and the allowed values.
    """
    ids = batch.ragged("input_ids")
    longest = int(ids.lengths.max(initial=0))
    if config.model_json and longest > config.max_position_embeddings:
        raise ShapeError(
            f"rows must have at most {config.max_position_embeddings} tokens, the positions of the policy that do not "
            f"depend on other rows; row {int(ids.lengths.argmax())} has {longest}. Shorten prompts or responses."
        )
    check_images(batch, config.image_token_id)
    is_outside = (ids.values < 0) | (ids.values >= config.vocab_size)
    if is_outside.any():
        place = int(np.flatnonzero(is_outside)[0])
        raise ShapeError(
            f"input_ids must be in [0, {config.vocab_size - 1}], the policy's vocabulary; row {_row_of(ids, place)} "
            f"has {int(ids.values[place])}. Check that tokenizer and policy belong to the same model."
        )
    if NUCLEUS in batch:
        _check_nucleus(batch, config.vocab_size)
    if ROUTED_EXPERTS in batch:
        _check_experts(batch.ragged(ROUTED_EXPERTS), config)


def _check_nucleus(batch: Batch, vocab_size: int) -> None:
    ids, nucleus = batch.ragged("input_ids"), batch.ragged(NUCLEUS)
    if "target_ids" in batch:
        raise ShapeError("a batch has target_ids or nucleus_ids, which both say what to score; found both. Drop one.")
    ordered = np.sort(nucleus.values, axis=1)
    is_wrong = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    is_wrong |= (ordered < -1).any(1) | (ordered >= vocab_size).any(1)
    is_known = (ordered >= 0).any(1)
    needs = batch.ragged("loss_mask").values if "loss_mask" in batch else is_known
    is_wrong |= (needs | is_known) & ~(nucleus.values == ids.values[:, None]).any(1)
    if is_wrong.any():
        place = int(np.flatnonzero(is_wrong)[0])
        row = _row_of(ids, place)
        raise ShapeError(
            f"nucleus_ids must be different ids below {vocab_size} that include each trained token, then -1; row "
            f"{row}, token {place - int(ids.offsets[row])} ({int(ids.values[place])}) has "
            f"{nucleus.values[place].tolist()}. "
            "Keep each row of Generation.nucleus_ids at its token."
        )


def _check_experts(chosen: Ragged, config: PolicyConfig) -> None:
    if config.model_json:
        raise ShapeError(
            f"routed_experts cannot be replayed: {config.architecture} is computed by transformers' class, whose "
            "routers choose for themselves. Drop the column."
        )
    if config.mixture is None:
        raise ShapeError("routed_experts need a mixture of experts; this policy is dense. Drop the column.")
    wanted = (config.num_layers, config.mixture.top_k)
    if tuple(chosen.values.shape[1:]) != wanted:
        raise ShapeError(
            f"routed_experts must have {list(wanted)} (layers, top_k) per token, as in this policy; found "
            f"{list(chosen.values.shape[1:])}."
        )
    top_k, last = config.mixture.top_k, config.mixture.num_experts - 1
    by_choice = np.ascontiguousarray(np.moveaxis(chosen.values, -1, 0))
    is_wrong = ((by_choice < 0) | (by_choice > last)).any(0)
    for one, other in itertools.combinations(by_choice, 2):
        is_wrong |= one == other
    is_wrong &= ~(by_choice == -1).all(0)
    if is_wrong.any():
        place, layer = (int(index) for index in np.argwhere(is_wrong)[0])
        row = _row_of(chosen, place)
        where = f"row {row}, token {place - int(chosen.offsets[row])}, layer {layer}"
        raise ShapeError(
            f"routed_experts must be {top_k} different experts from 0 to {last} for each token and layer, or all -1 "
            f"if unknown; {where} has {chosen.values[place, layer].tolist()}. Check that the row was sampled by an "
            "engine with this policy."
        )


def _row_of(column: Ragged, place: int) -> int:
    return int(np.searchsorted(column.offsets, place, side="right")) - 1
