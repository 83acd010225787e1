"""Off-policy distillation: turns texts that a teacher wrote, stored with the prompts, into training trajectories."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, MinLen

from rl_core.data import NO_VERSION, Prompt, Trajectory
from rl_core.errors import DataError
from rl_core.files import preview
from rl_core.record_fields import settings_record

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Returns the token ids of each text, without special tokens around it."""
CHUNK_PROMPTS = 1024


@settings_record
class TextOptions:
    """How texts become trajectories.

    Attributes:
        column: Column of the prompts with a text or a list of texts; each text becomes a session.
        end_token_id: Appended to texts that do not end with it; it is trained as well.
        max_response_tokens: Maximum tokens of a text, including the end token.
        overlong: What to do with longer texts: "error" or "drop".
    """

    column: Annotated[str, MinLen(1)]
    end_token_id: int
    max_response_tokens: Annotated[int, Ge(2)]
    overlong: Literal["error", "drop"] = "error"


def trajectories_from_texts(prompts: Sequence[Prompt], options: TextOptions, *, encode: Encode) -> list[Trajectory]:
    """Return one trajectory per text, prompt by prompt; sessions of a prompt are numbered from 0.

    No policy sampled these tokens, so rollout_logprobs are 0 and policy_versions NO_VERSION.

    Args:
        prompts: Prompts that have the column.
        options: How texts become trajectories.
        encode: Encodes texts with the student's tokenizer.

    Returns:
        Trajectories without those of dropped texts; a prompt may have none.

    Raises:
        DataError: A prompt's column is missing or empty, or a text is too long.
    """
    texts = [(prompt, text) for prompt in prompts for text in _texts_of(prompt, options.column)]
    encoded = encode([text for _, text in texts]) if texts else []
    num_sessions: dict[str, int] = {}
    trajectories = []
    for (prompt, text), ids in zip(texts, encoded, strict=True):
        response = ids if ids[-1:] == [options.end_token_id] else [*ids, options.end_token_id]
        if len(response) > options.max_response_tokens:
            if options.overlong == "drop":
                continue
            raise DataError(
                f"prompt {prompt.uid!r}, column {options.column!r}: the text {preview(text, most=60)} has "
                f"{len(response)} tokens, more than rollout.max_response_tokens = {options.max_response_tokens}. "
                'Raise it, or set prompts.overlong = "drop".'
            )
        session = num_sessions.setdefault(prompt.uid, 0)
        num_sessions[prompt.uid] += 1
        trajectories.append(_trajectory(prompt, response, session_index=session))
    return trajectories


def count_texts(prompts: Iterable[Prompt], options: TextOptions, *, encode: Encode) -> tuple[int, int]:
    """Check all texts before models are loaded, and count them.

    Returns:
        The numbers of texts to train on and of dropped texts.

    Raises:
        DataError: A text is missing or too long, or every text is dropped.
    """
    num_kept = num_texts = 0
    rest = iter(prompts)
    while chunk := list(islice(rest, CHUNK_PROMPTS)):
        num_texts += sum(len(_texts_of(prompt, options.column)) for prompt in chunk)
        num_kept += len(trajectories_from_texts(chunk, options, encode=encode))
    if not num_kept:
        raise DataError(
            f"all {num_texts} texts in column {options.column!r} are longer than rollout.max_response_tokens = "
            f"{options.max_response_tokens}. Raise it."
        )
    return num_kept, num_texts - num_kept


def _texts_of(prompt: Prompt, column: str) -> Sequence[str]:
    """Return the texts of a prompt: at least one, none of them empty."""
    if column not in prompt.columns:
        there = ", ".join(map(repr, sorted(prompt.columns))) or "none"
        raise DataError(
            f"distillation.texts is the column {column!r}, which prompt {prompt.uid!r} does not have; its columns: "
            f"{there}."
        )
    value = prompt.columns[column]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"prompt {prompt.uid!r}, column {column!r} must be a string, or a list of at least one; found "
            f"{preview(value, most=60)}."
        )
    if "" in texts:
        raise DataError(f"prompt {prompt.uid!r}, column {column!r} has an empty text. Remove it.")
    return texts


def _trajectory(prompt: Prompt, response: Sequence[int], *, session_index: int) -> Trajectory:
    ids = np.concatenate([prompt.input_ids, np.asarray(response, dtype=np.int32)]).astype(np.int32, copy=False)
    return Trajectory(
        prompt_uid=prompt.uid,
        session_index=session_index,
        input_ids=ids,
        loss_mask=np.arange(len(ids)) >= len(prompt.input_ids),
        rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
        policy_versions=np.full(len(ids), NO_VERSION, dtype=np.int32),
    )
