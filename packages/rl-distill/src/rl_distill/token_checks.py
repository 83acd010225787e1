"""Checks of a batch's tokens against the policy, done once before the ranks compute."""

import itertools

import numpy as np

from rl_core.data import Batch, Ragged
from rl_core.errors import ShapeError
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.prefixes import ROUTED_EXPERTS


def check_tokens(batch: Batch, config: PolicyConfig) -> None:
    """Check that tokens are in the vocabulary, and that a token's experts are distinct, complete and in the policy.

    Raises:
        ShapeError: A check fails; the message names the row, the value and the allowed values.
    """
    ids = batch.ragged("input_ids")
    is_outside = (ids.values < 0) | (ids.values >= config.vocab_size)
    if is_outside.any():
        place = int(np.flatnonzero(is_outside)[0])
        raise ShapeError(
            f"input_ids must be in [0, {config.vocab_size - 1}], the policy's vocabulary; row {_row_of(ids, place)} "
            f"has {int(ids.values[place])}. Check that tokenizer and policy belong to the same model."
        )
    if ROUTED_EXPERTS in batch:
        _check_experts(batch.ragged(ROUTED_EXPERTS), config)


def _check_experts(chosen: Ragged, config: PolicyConfig) -> None:
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
