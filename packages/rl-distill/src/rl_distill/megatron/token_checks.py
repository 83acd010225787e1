"""What tokens must be for a policy: checked once by the caller, before ranks compute with them."""

import numpy as np

from rl_core.data import Batch, Ragged
from rl_core.errors import ShapeError
from rl_distill.policy_config import PolicyConfig
from rl_distill.prefixes import ROUTED_EXPERTS


def check_tokens(batch: Batch, config: PolicyConfig) -> None:
    """Refuse tokens outside the vocabulary, and chosen experts that the policy has not.

    Raises:
        ShapeError: Names the row, what was found, and what would do.
    """
    ids = batch.ragged("input_ids")
    is_outside = (ids.values < 0) | (ids.values >= config.vocab_size)
    if is_outside.any():
        place = int(np.flatnonzero(is_outside)[0])
        raise ShapeError(
            f"input_ids must be from 0 to {config.vocab_size - 1}, the policy's vocabulary; "
            f"row {_row_of(ids, place)} has {int(ids.values[place])}. Are tokenizer and policy of the same model?"
        )
    if ROUTED_EXPERTS in batch:
        _check_experts(batch.ragged(ROUTED_EXPERTS), config)


def _check_experts(chosen: Ragged, config: PolicyConfig) -> None:
    if config.mixture is None:
        raise ShapeError("routed_experts are for a mixture of experts; this policy is dense. Leave the column out.")
    wanted = (config.num_layers, config.mixture.top_k)
    if tuple(chosen.values.shape[1:]) != wanted:
        raise ShapeError(
            f"routed_experts must have {list(wanted)} (layers, top_k) for each token, as this policy has; found "
            f"{list(chosen.values.shape[1:])}."
        )
    is_outside = chosen.values >= config.mixture.num_experts
    if is_outside.any():
        place = int(np.argwhere(is_outside)[0][0])
        raise ShapeError(
            f"routed_experts must be below {config.mixture.num_experts}, or -1 where nothing is known; row "
            f"{_row_of(chosen, place)} has {int(chosen.values[is_outside][0])}."
        )


def _row_of(column: Ragged, place: int) -> int:
    return int(np.searchsorted(column.offsets, place, side="right")) - 1
