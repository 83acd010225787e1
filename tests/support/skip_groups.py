"""Groups of rollouts for tests of skip caches, and their comparison."""

import json
from collections.abc import Sequence

import numpy as np

from rl_core.data.records import NO_VERSION, Prompt, Timings, Trajectory
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult

VOCABULARY = 150_000
TOKEN_COLUMNS = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
RECORD_FIELDS = (
    *("prompt_uid", "session_index", "output_index", "parent", "finish_reason", "timings"),
    *("images", "reward_baseline"),
)
PROMPT_FIELDS = ("uid", "data_source", "images")


def make_groups(
    num_prompts: int = 2, group_size: int = 2, seed: int = 0, *, min_tokens: int = 8, max_tokens: int = 24
) -> list[GroupResult]:
    """Return ragged groups with one plain trajectory per session, sampled by version 3; equal for equal arguments."""
    rng = np.random.default_rng(seed)
    return [_group(rng, f"p{index}", group_size, (min_tokens, max_tokens)) for index in range(num_prompts)]


def make_prompts_of(groups: Sequence[GroupResult]) -> list[Prompt]:
    """Return the prompts of groups."""
    return [group.prompt for group in groups]


def assert_same_groups(found: Sequence[GroupResult], expected: Sequence[GroupResult]) -> None:
    """Check that every field of every record has equal bits and type; a failed group's exception is ignored."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        _assert_same_prompt(a.prompt, b.prompt)
        assert (a.num_audited, a.num_audit_failures) == (b.num_audited, b.num_audit_failures)
        assert [session.failure for session in a.sessions] == [session.failure for session in b.sessions]
        for one, other in zip(a.sessions, b.sessions, strict=True):
            assert len(one.trajectories) == len(other.trajectories)
            for row, wanted in zip(one.trajectories, other.trajectories, strict=True):
                _assert_same_row(row, wanted)


def _assert_same_prompt(a: Prompt, b: Prompt) -> None:
    for name in PROMPT_FIELDS:
        assert getattr(a, name) == getattr(b, name), name
    _assert_same_bits(a.input_ids, b.input_ids, "input_ids")
    assert _text(list(a.messages)) == _text([dict(message) for message in b.messages])
    assert _text(a.ground_truth) == _text(b.ground_truth)
    assert _text(dict(a.columns)) == _text(dict(b.columns))


def _assert_same_row(a: Trajectory, b: Trajectory) -> None:
    for name in RECORD_FIELDS:
        assert getattr(a, name) == getattr(b, name), name
    for name in TOKEN_COLUMNS:
        _assert_same_bits(getattr(a, name), getattr(b, name), name)
    for name in ("routed_experts", "nucleus_ids"):
        if getattr(b, name) is None or not len(b.input_ids):
            assert getattr(a, name) is None or not len(b.input_ids)
        else:
            _assert_same_bits(getattr(a, name), getattr(b, name), name)
    assert _text(a.reward) == _text(b.reward)
    assert _text(dict(a.reward_components)) == _text(dict(b.reward_components))
    assert _text(dict(a.extras)) == _text(dict(b.extras))


def _assert_same_bits(a: np.ndarray, b: np.ndarray, name: str) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), name
    assert a.tobytes() == b.tobytes(), name


def _text(value: object) -> str:
    """Return JSON for a strict comparison: 1 differs from 1.0 and True, and NaN equals NaN."""
    return json.dumps(value)


def _group(rng: np.random.Generator, uid: str, group_size: int, bounds: tuple[int, int]) -> GroupResult:
    prompt = Prompt(
        uid=uid,
        input_ids=_tokens(rng, 4),
        messages=({"role": "user", "content": f"What is {uid}?"},),
        data_source="sums",
        ground_truth=uid,
        columns={"difficulty": int(rng.integers(9))},
    )
    sessions = (SessionResult(trajectories=(_row(rng, prompt, index, bounds),)) for index in range(group_size))
    return GroupResult(prompt=prompt, sessions=tuple(sessions), num_audited=1)


def _row(rng: np.random.Generator, prompt: Prompt, session_index: int, bounds: tuple[int, int]) -> Trajectory:
    num_response = int(rng.integers(bounds[0], bounds[1] + 1))
    num_prompt = len(prompt.input_ids)
    mask = np.arange(num_prompt + num_response) >= num_prompt
    return Trajectory(
        prompt_uid=prompt.uid,
        session_index=session_index,
        input_ids=np.concatenate([prompt.input_ids, _tokens(rng, num_response)]),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -rng.exponential(1.0, len(mask)), 0).astype(np.float32),
        policy_versions=np.where(mask, 3, NO_VERSION).astype(np.int32),
        finish_reason="length" if num_response == bounds[1] else "stop",
        reward=float(rng.integers(2)),
        reward_components={"exact": float(rng.integers(2))},
        timings=Timings(generate_s=float(rng.random()), reward_s=0.25),
        extras={"num_turns": 1},
    )


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count).astype(np.int32)
