from dataclasses import replace

import numpy as np
import pytest

from rl_core.errors import DataError
from rl_core.records import Trajectory
from rl_rollout import Generation, audit_trajectory


def generation(token_ids, logprobs, version):
    return Generation(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        policy_versions=np.full(len(token_ids), version, dtype=np.int32),
        finish_reason="stop",
    )


TURNS = [generation([5, 6], [-0.1, -0.2], 3), generation([7, 1], [-0.3, -0.4], 4)]
TRAJECTORY = Trajectory(  # prompt 8 9, turn 5 6, tool output 2 2, turn 7 1
    prompt_uid="p",
    session_index=0,
    input_ids=np.array([8, 9, 5, 6, 2, 2, 7, 1], dtype=np.int32),
    loss_mask=np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=np.bool_),
    rollout_logprobs=np.array([0, 0, -0.1, -0.2, 0, 0, -0.3, -0.4], dtype=np.float32),
    policy_versions=np.array([-1, -1, 3, 3, -1, -1, 4, 4], dtype=np.int32),
)


def changed(name, position, value):
    array = getattr(TRAJECTORY, name).copy()
    array[position] = value
    return replace(TRAJECTORY, **{name: array})


def test_what_was_sampled_passes():
    audit_trajectory(TRAJECTORY, TURNS)


def test_masking_sampled_tokens_passes():
    mask = np.array([0, 0, 0, 0, 0, 0, 1, 1], dtype=np.bool_)
    masked = replace(
        TRAJECTORY,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, TRAJECTORY.rollout_logprobs, 0).astype(np.float32),
        policy_versions=np.where(mask, TRAJECTORY.policy_versions, -1).astype(np.int32),
    )
    audit_trajectory(masked, TURNS)


@pytest.mark.parametrize(
    ("name", "position", "value", "message"),
    [
        ("input_ids", 3, 4, r"trajectory p/0/0: tokens 2\.\.3 are trained, but the engine sampled no such run"),
        ("rollout_logprobs", 7, -0.5, r"tokens 6\.\.7"),
        ("policy_versions", 2, 4, r"tokens 2\.\.3"),
        ("loss_mask", 4, True, r"tokens 2\.\.4"),
        ("loss_mask", 2, False, r"token 2 is masked, so its logprob must be 0"),
        ("rollout_logprobs", 0, -1.0, r"token 0 is masked"),
        ("policy_versions", 5, 3, r"token 5 is masked"),
    ],
)
def test_any_change_is_found(name, position, value, message):
    with pytest.raises(DataError, match=message):
        audit_trajectory(changed(name, position, value), TURNS)


def test_turns_out_of_order_or_used_twice_are_found():
    with pytest.raises(DataError, match=r"tokens 6\.\.7"):
        audit_trajectory(TRAJECTORY, TURNS[::-1])
    twice = replace(
        TRAJECTORY,
        **{name: np.tile(getattr(TRAJECTORY, name)[:6], 2) for name in ("input_ids", "loss_mask", "policy_versions")},
        rollout_logprobs=np.tile(TRAJECTORY.rollout_logprobs[:6], 2),
    )
    with pytest.raises(DataError, match=r"tokens 8\.\.9"):
        audit_trajectory(twice, TURNS)


def test_a_retokenized_run_must_be_unbroken():
    gap = [generation([5, 2, 6], [-0.1, -1.0, -0.2], 3), TURNS[1]]
    with pytest.raises(DataError, match=r"tokens 2\.\.3"):
        audit_trajectory(TRAJECTORY, gap)


def test_nothing_trained_passes_without_generations():
    nothing = Trajectory(
        prompt_uid="p",
        session_index=0,
        input_ids=np.array([8], dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.bool_),
        rollout_logprobs=np.zeros(1, dtype=np.float32),
        policy_versions=np.full(1, -1, dtype=np.int32),
    )
    audit_trajectory(nothing, [])
    with pytest.raises(DataError, match="sampled no such run"):
        audit_trajectory(TRAJECTORY, [])
