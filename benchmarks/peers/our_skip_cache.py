"""Our skip cache as a system of benchmarks/skip_cache.py: an entry of 128 prompts with 8 sessions each."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _skip_protocol import serve
from _skip_samples import GROUP_SIZE, PROMPT_TOKENS, Rows, positions
from numpy.typing import NDArray

from rl_core import Prompt, Trajectory
from rl_core.data import NO_VERSION
from rl_rollout import GroupResult
from rl_rollout.loops import SessionResult
from rl_rollout.skip import EntryKey, EntryStore

KEY = EntryKey(step=1)
POLICY_VERSION = 7


class SkipCache:
    """Entries in a folder."""

    def __init__(self, samples: Rows, *, compress: bool) -> None:
        """Convert the samples to groups."""
        self._groups = make_groups(samples)
        self._compress = compress

    def write(self, place: Path) -> None:
        """See `System.write`."""
        self._store(place).write(KEY, self._groups, fingerprint={}, generate_s=1.0)

    def read(self, place: Path) -> Sequence[GroupResult]:
        """See `System.read`."""
        entry = self._store(place).read(KEY)
        if entry is None:
            raise RuntimeError(f"{place} must have the entry {KEY.name}; it has none.")
        return entry.groups or ()

    def columns(self, found: Sequence[GroupResult]) -> Mapping[str, NDArray[Any]]:
        """See `System.columns`."""
        rows = [row for group in found for row in group.trajectories]
        masks = np.concatenate([row.loss_mask for row in rows])
        versions = np.concatenate([row.policy_versions for row in rows])
        if not np.array_equal(versions, np.where(masks, POLICY_VERSION, NO_VERSION)):
            raise ValueError("policy_versions must be read as they were written; they differ.")
        lengths = np.asarray([len(row.input_ids) for row in rows], dtype=np.int64)
        return {
            "input_ids": np.concatenate([row.input_ids for row in rows]),
            "position_ids": positions(lengths),
            "logprobs": np.concatenate([row.rollout_logprobs for row in rows]),
            "mask": masks,
        }

    def _store(self, place: Path) -> EntryStore:
        return EntryStore(str(place), compress=self._compress)


def make_groups(samples: Rows) -> list[GroupResult]:
    """Return the samples as rollouts with one trajectory per session."""
    ends = np.cumsum(samples.lengths)[:-1]
    columns = samples.columns
    ids = np.split(columns["input_ids"].astype(np.int32), ends)
    masks = np.split(columns["mask"].astype(np.bool_), ends)
    logprobs = np.split(columns["logprobs"], ends)
    groups = []
    for number in range(len(ids) // GROUP_SIZE):
        uid, first = f"prompt-{number}", number * GROUP_SIZE
        sessions = tuple(
            SessionResult(
                trajectories=(
                    Trajectory(
                        prompt_uid=uid,
                        session_index=row - first,
                        input_ids=ids[row],
                        loss_mask=masks[row],
                        rollout_logprobs=logprobs[row],
                        policy_versions=np.where(masks[row], POLICY_VERSION, NO_VERSION).astype(np.int32),
                        reward=float(row % 2),
                    ),
                )
            )
            for row in range(first, first + GROUP_SIZE)
        )
        prompt = Prompt(
            uid=uid,
            input_ids=ids[first][:PROMPT_TOKENS],
            messages=({"role": "user", "content": f"What is {number} + {number}?"},),
            ground_truth=str(2 * number),
        )
        groups.append(GroupResult(prompt=prompt, sessions=sessions))
    return groups


if __name__ == "__main__":
    COMPRESS = "--compress" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--compress"]
    sys.exit(serve(lambda samples: SkipCache(samples, compress=COMPRESS)))
