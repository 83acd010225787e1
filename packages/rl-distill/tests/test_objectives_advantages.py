import math
import random
import statistics
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, SettingsError, ShapeError
from rl_distill.objectives import ADVANTAGES, RewardedRows, dr_grpo_advantages, grpo_advantages
from rl_distill.objectives.advantages import (
    dr_grpo,
    gpg_advantages,
    grpo,
    lite_ppo_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    rloo_advantages,
)


def rows_of(rewards, group, session, output=None, *, lengths=None, loss_mask=None):
    lengths = lengths or [1] * len(rewards)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return RewardedRows(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor(group),
        session=torch.tensor(session),
        output=torch.tensor(output if output is not None else [0] * len(rewards)),
        loss_mask=torch.tensor(loss_mask) if loss_mask else torch.ones(int(offsets[-1]), dtype=torch.bool),
        offsets=offsets,
    )


def test_grpo_equals_a_literal():
    # Group 7: mean 0.5, unbiased deviation sqrt(((0.5^2) * 2) / 1) = 0.70710678. Group 3 has a single session.
    found = grpo_advantages(torch.tensor([1.0, 5.0, 0.0], dtype=torch.float64), torch.tensor([7, 3, 7]), eps=0.0)
    assert found.tolist() == pytest.approx([math.sqrt(0.5), 0.0, -math.sqrt(0.5)], rel=1e-12)


def test_dr_grpo_equals_a_literal():
    found = dr_grpo_advantages(torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 1]))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0], rel=1e-6)


def test_rloo_equals_a_literal():
    # Each reward minus the mean of the others: 1 - (0 + 2) / 2, 0 - 3 / 2, 2 - 1 / 2; a lone session has no others.
    found = rloo_advantages(torch.tensor([1.0, 0.0, 2.0, 9.0]), torch.tensor([0, 0, 0, 1]))
    assert found.tolist() == pytest.approx([0.0, -1.5, 1.5, 0.0], abs=1e-6)


def test_opo_equals_a_literal():
    # The baseline weights rewards by length: (1 * 1 + 3 * 0) / 4 = 0.25.
    found = opo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 3]))
    assert found.tolist() == pytest.approx([0.75, -0.25], rel=1e-6)


def test_opo_counts_the_tokens_of_all_trajectories_of_a_session():
    rows = rows_of([9.0, 1.0, 0.0], [0, 0, 0], [0, 0, 1], [0, 1, 0], lengths=[2, 1, 1])
    assert ADVANTAGES.get("opo")(rows)["advantages"].tolist() == pytest.approx([0.25, 0.25, 0.25, -0.75])


def test_gpg_equals_a_literal():
    # Only the two sessions of the first group have different rewards: alpha = 4 / 2.
    found = gpg_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    assert found.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0])
    by_std = gpg_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]), divide_by_std=True, eps=0.0)
    assert by_std.tolist() == pytest.approx([math.sqrt(2), -math.sqrt(2), 0.0, 0.0], rel=1e-6)


def test_passk_equals_a_literal():
    # The best leads the second by 2, and the deviation of 5, 3, 1 is 2. A tie and a lone session have no lead.
    rewards = torch.tensor([5.0, 3.0, 1.0, 4.0, 4.0, 0.0, 7.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    assert passk_advantages(rewards, group, eps=0.0).tolist() == pytest.approx([1.0, 0, 0, 0, 0, 0, 0])
    assert passk_advantages(rewards, group, divide_by_std=False).tolist() == [2.0, 0, 0, 0, 0, 0, 0]


def paper_lite_ppo(groups):
    """Lite PPO, section 5: the group's mean and the deviation of every reward of the batch."""
    rewards = [reward for group in groups for reward in group]
    return [(r - statistics.fmean(group)) / statistics.stdev(rewards) for group in groups for r in group]


def paper_maxrl(groups):
    """MaxRL, algorithm 1: the N scores weigh r / K - 1 / N with K successes, times N; 0 without success."""
    return [len(group) * (r / sum(group) - 1 / len(group)) if sum(group) else 0.0 for group in groups for r in group]


@pytest.mark.parametrize(
    ("estimate", "paper"), [(partial(lite_ppo_advantages, eps=0.0), paper_lite_ppo), (maxrl_advantages, paper_maxrl)]
)
def test_golden_numbers_of_the_papers(estimate, paper):
    generator = random.Random(3)
    groups = [[0.0, 0.0, 0.0], [1.0, 1.0]] + [
        [float(generator.random() < rate) for _ in range(size)] for rate, size in [(0.1, 9), (0.5, 4), (0.9, 7)]
    ]
    rewards = torch.tensor([reward for group in groups for reward in group])
    of_rows = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    assert estimate(rewards, of_rows).tolist() == pytest.approx(paper(groups), abs=1e-5)


def test_lite_ppo_does_not_scale_up_a_group_that_hardly_differs():
    # All rewards: mean 0.745, deviation sqrt((2 * 0.255^2 + 0.235^2 + 0.745^2) / 3) = 0.496756.
    rewards = torch.tensor([1.0, 0.98, 1.0, 0.0], dtype=torch.float64)
    found = lite_ppo_advantages(rewards, torch.tensor([0, 0, 1, 1]), eps=0.0)
    assert found.tolist() == pytest.approx([0.0201306, -0.0201306, 1.0065308, -1.0065308], abs=1e-6)


def test_maxrl_of_a_mean_that_is_not_above_zero_is_zero():
    assert maxrl_advantages(torch.tensor([-1.0, 0.5]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


def test_rewards_of_tokens_count_in_the_trajectorys():
    rows = rows_of([1.0, 0.0], [0, 0], [0, 1], lengths=[2, 1], loss_mask=[True, True, True])
    rows = replace(rows, columns={"token_rewards": torch.tensor([-0.25, -0.25, 0.0], dtype=torch.float64)})
    assert dr_grpo(rows)["advantages"].tolist() == [0.25, 0.25, -0.25]


def test_negative_eps_is_refused():
    with pytest.raises(SettingsError, match=r"eps of grpo_advantages must be a finite number of at least 0; found -1"):
        grpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), eps=-1.0)


NEWER = (lite_ppo_advantages, maxrl_advantages)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -1e6, 0.0])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_group_with_equal_rewards_gets_exact_zeros(reward, size):
    # In floating point, the mean of seven times 0.1 is not 0.1; divided by eps, the difference would train.
    rewards = torch.full((size,), reward, dtype=torch.float64)
    group = torch.zeros(size, dtype=torch.int64)
    assert opo_advantages(rewards, group, torch.arange(size)).tolist() == [0.0] * size
    for estimate in (grpo_advantages, dr_grpo_advantages, rloo_advantages, gpg_advantages, passk_advantages, *NEWER):
        assert estimate(rewards, group).tolist() == [0.0] * size


@pytest.mark.parametrize(
    "estimate",
    [grpo_advantages, dr_grpo_advantages, rloo_advantages, gpg_advantages, passk_advantages],
)
def test_rewards_that_differ_by_rounding_teach_nothing(estimate):
    group = torch.zeros(8, dtype=torch.int64)
    noise = torch.tensor([1.0] * 7 + [1.0 + 1.2e-7])
    assert noise[-1] > 1.0
    assert estimate(noise, group).tolist() == [0.0] * 8
    assert estimate(-noise, group).tolist() == [0.0] * 8
    small = torch.tensor([0.0] * 7 + [1e-5])
    assert estimate(small, group)[-1] > 0.0


def test_last_trajectory_decides_for_its_session():
    # Session 0 has outputs 0 and 1, in reverse order; the reward of output 1 counts.
    rows = rows_of([1.0, 9.0, 0.0], [0, 0, 0], [0, 0, 1], [1, 0, 0], lengths=[2, 1, 2])
    assert dr_grpo(rows)["advantages"].tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]


def test_sessions_are_counted_once_whatever_they_gave():
    # The session rewards are 3, 0, 0: session 0 counts once in the mean, despite its three outputs.
    rows = rows_of([3.0, 3.0, 3.0, 0.0, 0.0], [0] * 5, [0, 0, 0, 1, 2], [0, 1, 2, 0, 0])
    assert dr_grpo(rows)["advantages"].tolist() == [2.0, 2.0, 2.0, -1.0, -1.0]


def test_same_session_number_in_another_group_is_another_session():
    rows = rows_of([1.0, 0.0, 5.0, 7.0], [0, 0, 1, 1], [0, 1, 0, 1])
    assert dr_grpo(rows)["advantages"].tolist() == [0.5, -0.5, -1.0, 1.0]


def test_masked_tokens_get_zero():
    rows = rows_of([1.0, 0.0], [0, 0], [0, 1], lengths=[2, 2], loss_mask=[False, True, False, True])
    assert dr_grpo(rows)["advantages"].tolist() == [0.0, 0.5, 0.0, -0.5]


def test_no_rows_have_no_advantages():
    rows = rows_of([], [], [])
    assert grpo(rows)["advantages"].shape == (0,)


def test_missing_reward_is_refused_with_its_row():
    with pytest.raises(DataError, match=r"rows \[1\] of 2 are not"):
        rows_of([1.0, math.nan], [0, 0], [0, 1])


def test_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match=r"group must have shape \[N\]"):
        rows_of([1.0, 0.0], [0], [0, 1])
    with pytest.raises(ShapeError, match="offsets"):
        rows_of([1.0, 0.0], [0, 0], [0, 1], lengths=[1, 2, 3])
    with pytest.raises(ShapeError, match="never decrease"):
        rows_of([1.0, 0.0], [0, 0], [0, 1], lengths=[2, 3], loss_mask=[True])


rewards_and_groups = st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3)), min_size=1, max_size=20)


@settings(deadline=None)
@given(rewards_and_groups)
def test_groups_sum_to_zero_and_order_does_not_matter(pairs):
    rewards = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64)
    group = torch.tensor([index for _, index in pairs])
    found = grpo_advantages(rewards, group)
    for index in group.unique():
        assert abs(float(found[group == index].sum())) < 1e-6
    order = torch.arange(len(pairs) - 1, -1, -1)
    torch.testing.assert_close(grpo_advantages(rewards[order], group[order]), found[order], rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(rewards_and_groups, st.floats(-10, 10))
def test_dr_grpo_ignores_a_constant_added_to_all_rewards(pairs, shift):
    rewards = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64)
    group = torch.tensor([index for _, index in pairs])
    torch.testing.assert_close(
        dr_grpo_advantages(rewards + shift, group), dr_grpo_advantages(rewards, group), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_rewards_of_whole_numbers_have_advantages_of_fractions(dtype):
    rewards, group = torch.tensor([1, 0, 0, 1]).to(dtype), torch.zeros(4, dtype=torch.int64)

    torch.testing.assert_close(grpo_advantages(rewards, group), grpo_advantages(rewards.float(), group))
    torch.testing.assert_close(dr_grpo_advantages(rewards, group), torch.tensor([0.5, -0.5, -0.5, 0.5]))
