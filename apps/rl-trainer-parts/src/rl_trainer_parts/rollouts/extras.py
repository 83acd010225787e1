"""The fields of a rollout's record that travel through the queue, in the extras of its row."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_core import Prompt, Trajectory
from rl_core.data import IntArray, Json

EXTRA = "_rollout"
"""Key of the record's own fields in a row's extras; an agent loop's extra of the same name is dropped."""

WORK = ("generate_s", "tools_s", "reward_s")
"""Timings that add up to a session's time."""


def rollout_extras(prompt: Prompt, trajectory: Trajectory) -> dict[str, Json]:
    """A trajectory's extras plus the fields that rollouts.jsonl needs; they travel through the queue."""
    timings = trajectory.timings
    fields: dict[str, Json] = {
        "source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "components": dict(trajectory.reward_components),
        "finish": trajectory.finish_reason,
        "timings": {name: getattr(timings, name) for name in (*WORK, "preemptions")},
        "problem": problem_id(prompt.input_ids),
    }
    return {**trajectory.extras, EXTRA: fields}


def problem_id(prompt_ids: IntArray) -> str:
    """Return an id of a prompt that depends only on its tokens, so it is the same in every epoch and run."""
    return hashlib.blake2b(np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes(), digest_size=8).hexdigest()


def record_fields(extras: Mapping[str, Json]) -> dict[str, Any]:
    """The fields that `rollout_extras` added; empty for rows from a run that records no rollouts."""
    fields = extras.get(EXTRA)
    return fields if isinstance(fields, dict) else {}


def took_s(extras: Mapping[str, Json]) -> float:
    """Seconds that a row's session took; 0 for rows from a run that records no rollouts."""
    timings = record_fields(extras).get("timings", {})
    return math.fsum(timings.get(name, 0.0) for name in WORK)
