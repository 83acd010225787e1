"""The fields of a rollout's record that travel through the queue, in the extras of its row."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from rl_core import Prompt, Trajectory
from rl_core.data import IntArray, Json

EXTRA = "_rollout"
"""Key of the record's own fields in a row's extras; an agent loop's extra of the same name is dropped."""

NUM_SAID = 9
"""Number of values in the list of fields; a list is faster to build and send than a dict."""


def rollout_extras(prompt: Prompt, trajectory: Trajectory) -> dict[str, Json]:
    """A trajectory's extras plus the fields that rollouts.jsonl needs; they travel through the queue."""
    timings = trajectory.timings
    said: list[Json] = [
        prompt.data_source,
        prompt.ground_truth,
        dict(trajectory.reward_components),
        trajectory.finish_reason,
        timings.generate_s,
        timings.tools_s,
        timings.reward_s,
        timings.preemptions,
        problem_id(prompt.input_ids),
    ]
    return {**trajectory.extras, EXTRA: said}


def problem_id(prompt_ids: IntArray) -> str:
    """Return an id of a prompt that depends only on its tokens, so it is the same in every epoch and run."""
    return hashlib.blake2b(np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes(), digest_size=8).hexdigest()


def took_s(extras: Mapping[str, Json]) -> float:
    """Seconds that a row's session took; 0 for rows from a run that records no rollouts."""
    said = extras.get(EXTRA)
    return said[4] + said[5] + said[6] if _is_said(said) else 0.0


def said_fields(extras: Mapping[str, Json]) -> dict[str, Any]:
    """The fields that `rollout_extras` added; empty for rows from a run that records no rollouts."""
    said = extras.get(EXTRA)
    if not _is_said(said):
        return {}
    source, truth, components, finish, generate_s, tools_s, reward_s, preemptions, problem = said
    timings = {"generate_s": generate_s, "tools_s": tools_s, "reward_s": reward_s, "preemptions": preemptions}
    return {
        "source": source,
        "ground_truth": truth,
        "components": components,
        "finish": finish,
        "timings": timings,
        "problem": problem,
    }


def _is_said(said: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(said, (list, tuple)) and len(said) == NUM_SAID
