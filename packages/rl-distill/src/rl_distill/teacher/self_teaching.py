"""On-policy self-distillation: the policy scores its own responses under another prompt, or with other weights.

Sources: a demonstration in the prompt, Shenfeld et al. 2026, arXiv:2601.19897; the solution, Zhao et al. 2026,
arXiv:2601.18734; feedback and successful responses of the group, Huebotter et al. 2026, arXiv:2601.20802.
"""

from collections.abc import Callable

import numpy as np

from rl_core.data import Batch, Column, Ragged
from rl_distill.teacher.scores import NO_TEACHER, NO_TOKEN

TEACHER_PROMPT = "_teacher_prompt"
"""Key in a row's extras: number of the row's first tokens that the teacher does not read, and ids of its own prompt."""

ScoreTokens = Callable[[Batch], tuple[Ragged, Ragged, Ragged | None]]
"""Scores tokens as `rl_distill.megatron.learner.MegatronLearner.score` does, with its other arguments bound."""


def with_self_scores(batch: Batch, score: ScoreTokens, *, keeps_prompts: bool = False) -> Batch:
    """Add the columns of a teacher that reads another prompt before the same response.

    Rows without a teacher's prompt get no teacher (index -1).

    Args:
        batch: Rows with `input_ids`, `loss_mask` and, in their extras, `TEACHER_PROMPT`.
        score: Scores the rows under the teacher's prompts.
        keeps_prompts: The teacher reads the rows unchanged.

    Returns:
        The batch with `teacher_logprobs` and `teacher_ids` [K + 1], `teacher_index` and, if the scores have hidden
        states, `teacher_hidden` of each trained token.
    """
    ids, mask = batch.ragged("input_ids"), batch.ragged("loss_mask")
    prompts = [None if keeps_prompts else extras.get(TEACHER_PROMPT) for extras in batch.extras]
    rows = [row for row, of in enumerate(prompts) if mask[row].any() and (of is not None or keeps_prompts)]
    scored = rows or [0]  # without any, the scores of a row give the columns' shapes
    read = [ids[n] if (of := prompts[n]) is None else [*of[1], *ids[n][of[0] :]] for n in scored]
    tokens = Ragged.from_rows(read, dtype="int32")
    chosen = batch.select(scored).only(frozenset()).with_columns({"input_ids": tokens})
    found = score(chosen.with_extras([{}] * len(scored)))

    places = [np.flatnonzero(mask[row]) - len(mask[row]) for row in rows]  # from the end, where both are equal
    here, there = (
        np.concatenate([np.zeros(0, dtype=np.int64), *map(np.add, ends[: len(rows)], places)])
        for ends in (ids.offsets[1:][rows], tokens.offsets[1:])
    )
    index = np.full(len(mask.values), NO_TEACHER, dtype=np.int16)
    index[here] = 0
    columns: dict[str, Column] = {"teacher_index": Ragged(index, ids.offsets)}
    for name, scores in zip(("teacher_logprobs", "teacher_ids", "teacher_hidden"), found, strict=True):
        if scores is not None:
            empty = NO_TOKEN if name == "teacher_ids" else 0
            values = np.full((len(mask.values), *scores.element_shape), empty, dtype=scores.dtype)
            values[here] = scores.values[there]
            columns[name] = Ragged(values, ids.offsets)
    return batch.with_columns(columns)
