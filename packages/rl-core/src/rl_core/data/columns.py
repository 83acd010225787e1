"""The table of columns that rollouts and learners exchange; `declare_column` adds your own.

Ragged columns are aligned with `input_ids`: position t belongs to token t. `loss_mask[t]` is True if the policy sampled
token t and it trains. `*_logprobs[t]` is the natural-log probability of token t given the tokens before it, and 0 where
`loss_mask` is False.
"""

import numpy as np

from rl_core.errors import DataError, UnknownColumnError
from rl_core.record_fields import record


@record
class ColumnSpec:
    """Declaration of a column.

    Attributes:
        dtype: numpy dtype name of the values.
        is_ragged: True for one value per token (values and offsets), False for one value per row.
        meaning: One-sentence description.
        value_axes: Number of axes of one value: 0 for a number, None for any. Not checked in columns that you declare.
    """

    dtype: str
    is_ragged: bool
    meaning: str
    value_axes: int | None = 0


def _token(dtype: str, meaning: str, *, value_axes: int | None = 0) -> ColumnSpec:
    return ColumnSpec(dtype=dtype, is_ragged=True, meaning=meaning, value_axes=value_axes)


def _row(dtype: str, meaning: str) -> ColumnSpec:
    return ColumnSpec(dtype=dtype, is_ragged=False, meaning=meaning)


COLUMNS: dict[str, ColumnSpec] = {
    "input_ids": _token("int32", "Prompt and response tokens of one trajectory."),
    "loss_mask": _token("bool", "True where the token was sampled by the policy and trains."),
    "rollout_logprobs": _token("float32", "The engine's logprobs of the sampled tokens."),
    "policy_versions": _token("int32", "Policy version that sampled each token; -1 for other tokens."),
    "old_logprobs": _token("float32", "The learner's logprobs before the update (PPO's denominator)."),
    "policy_logprobs": _token("float32", "The learner's logprobs just before its update on the row."),
    "entropy": _token("float32", "Entropy of the learner's distribution at each trained token."),
    "reference_logprobs": _token("float32", "Logprobs of the frozen reference policy."),
    "teacher_logprobs": _token(
        "float32",
        "The teacher's logprobs: of the token, or [K + 1], the token's first, then the K largest, descending.",
        value_axes=None,
    ),
    "teacher_ids": _token(
        "int32", "Token ids [K + 1] of `teacher_logprobs`; missing entries have id -1 and logprob 0.", value_axes=1
    ),
    "teacher_hidden": _token(
        "float32",
        "The teacher's final hidden state [H], after its norm, that predicts the token.",
        value_axes=None,
    ),
    "teacher_index": _token("int16", "Index of the teacher that scored the token; -1 if none did."),
    "target_ids": _token(
        "int32",
        "Id or ids [K] whose logprobs the loss needs, not the token's own; -1 for none.",
        value_axes=None,
    ),
    "target_weights": _token("float32", "Weights [K] of `target_ids` in the loss.", value_axes=1),
    "sum_pi_squared": _token("float32", "Sum of the squared probabilities of all tokens in this place (OTB)."),
    "nucleus_ids": _token(
        "int32",
        "Ids [K] of the tokens that top-k and top-p kept when the token was sampled; -1 for none.",
        value_axes=1,
    ),
    "values": _token("float32", "The critic's values."),
    "advantages": _token("float32", "Advantage of each trained token; 0 where masked."),
    "returns": _token("float32", "Return of each trained token; 0 where masked."),
    "correction_weights": _token("float32", "Importance weights for the engine's mismatch."),
    "token_rewards": _token("float32", "Rewards per token in addition to the trajectory's, such as a KL penalty."),
    "token_selection": _token("bool", "True where a policy loss treats the token separately (Clip-Cov, KL-Cov)."),
    "loss_weights": _token("float32", "Weight of each token in the loss; sums the loss over the global batch."),
    "routed_experts": _token(
        "int16", "Experts [layers, top_k] that the engine chose for each token; -1 where unknown.", value_axes=2
    ),
    "reward": _row("float32", "Scalar reward of the trajectory."),
    "reward_baseline": _row("float32", "Reward of the greedy response to the same prompt (ReMax)."),
    "is_truncated": _row("bool", "True when the response hit its length limit."),
    "num_prompt_tokens": _row("int32", "Tokens before the first sampled token."),
}


BUILT_IN = frozenset(COLUMNS)
"""Names that cannot be declared."""


def declare_column(name: str, spec: ColumnSpec) -> None:
    """Declare a column of your own. Every process that writes or reads it must declare it.

    Raises:
        DataError: The name is invalid or has another declaration, or the dtype is neither a plain number nor bool.
    """
    if not name or name.startswith("#"):
        raise DataError(
            f"the name of a column must not be empty or begin with '#', which is reserved for row keys; found {name!r}."
        )
    if np.dtype(spec.dtype).kind not in "biuf":
        raise DataError(f"column {name!r} must contain numbers or bools; found dtype {spec.dtype}.")
    known = COLUMNS.setdefault(name, spec)
    if (known.dtype, known.is_ragged) != (spec.dtype, spec.is_ragged):
        raise DataError(f"column {name!r} is already declared as {known}; found {spec}. Choose another name.")


def column_spec(name: str) -> ColumnSpec:
    """Look a column up by name.

    Raises:
        UnknownColumnError: The name is not declared; the message lists the known ones.
    """
    try:
        return COLUMNS[name]
    except KeyError:
        known = ", ".join(sorted(COLUMNS))
        raise UnknownColumnError(
            f"unknown column {name!r}; known columns: {known}. Declare your own columns with `declare_column`."
        ) from None


def column_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of a declared column."""
    return np.dtype(column_spec(name).dtype)
