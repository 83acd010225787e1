"""A short sequence that checks whether a teacher's replica still returns the same scores."""

from typing import Any

import numpy as np

from rl_core.data import RowKey
from rl_distill.teacher.scores import TeacherRow, TeacherScores

PROBE_TOKENS = 4
"""Number of tokens in the sequence."""
PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum difference from the earlier logprobs, by dtype."""


def probe_row(vocab_size: int) -> TeacherRow:
    """Return the sequence, made of the first tokens of a vocabulary."""
    ids = np.arange(1, PROBE_TOKENS + 1, dtype=np.int32) % vocab_size
    mask: Any = np.arange(PROBE_TOKENS) > 0
    return TeacherRow(key=RowKey("probe", 0, 0), input_ids=ids, loss_mask=mask)


def probe_problem(answer: TeacherScores, first: TeacherScores, *, dtype: str, what: str) -> str | None:
    """Describe what is wrong with a replica's answer; None if it is right.

    Args:
        answer: The replica's scores of the sequence.
        first: The first answer of any of the teacher's replicas.
        dtype: Computation dtype of the teacher.
        what: When the sequence was scored, for the message.
    """
    found, expected = answer.logprobs[1:, 0], first.logprobs[1:, 0]
    if not np.isfinite(answer.logprobs).all():
        return (
            f"must return finite logprobs; it scored a short sequence {what} as {found.tolist()}. Check its weights "
            "for NaN or infinite values."
        )
    if not float(np.abs(found - expected).max()) <= PROBE_TOLERANCES[dtype]:
        return (
            f"must score a short sequence {what} as before; its logprobs were {expected.tolist()}, and are now "
            f"{found.tolist()}. Its weights changed: set sleep = false for it, and check its log."
        )
    return None
