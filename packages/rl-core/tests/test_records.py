import dataclasses

import numpy as np
import pytest

from rl_core.errors import ShapeError
from rl_core.testing import make_prompt, make_trajectory


def test_prompt_and_response_tokens_are_counted_from_the_first_sampled_one():
    trajectory = make_trajectory("p0", 0, num_response_tokens=4)
    assert (trajectory.num_prompt_tokens, trajectory.num_response_tokens) == (2, 4)


def test_a_tool_output_between_sampled_tokens_belongs_to_the_response():
    trajectory = make_trajectory(
        "p0", 0, num_response_tokens=4, loss_mask=np.asarray([False, False, True, False, True, False])
    )
    assert (trajectory.num_prompt_tokens, trajectory.num_response_tokens) == (2, 4)


def test_a_trajectory_without_sampled_tokens_is_all_prompt():
    trajectory = make_trajectory("p0", 0, num_response_tokens=3, loss_mask=np.zeros(5, dtype=bool))
    assert (trajectory.num_prompt_tokens, trajectory.num_response_tokens) == (5, 0)


@pytest.mark.parametrize("name", ["loss_mask", "rollout_logprobs", "policy_versions"])
def test_token_arrays_of_another_length_are_refused(name):
    array = getattr(make_trajectory("p7", 3, 2), name)
    with pytest.raises(
        ShapeError, match=rf"{name} of Trajectory\(.*session_index=3, .*\) must .* T = 5, as input_ids has; found \[4\]"
    ):
        make_trajectory("p7", 3, 2, **{name: array[:-1]})


def test_token_arrays_are_one_row():
    row = make_trajectory("p0", 0)
    names = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
    with pytest.raises(ShapeError, match=r"\[1, 5\]"):
        make_trajectory("p0", 0, **{name: getattr(row, name)[None] for name in names})


def test_records_cannot_be_changed_and_take_no_other_fields():
    trajectory, prompt = make_trajectory("p0", 0), make_prompt("p0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.reward = 2.0
    with pytest.raises((AttributeError, TypeError), match=r"uid_|super"):  # CPython's own, with slots
        prompt.uid_ = "p1"
    with pytest.raises(TypeError, match="rewrad"):
        dataclasses.replace(trajectory, rewrad=1.0)
