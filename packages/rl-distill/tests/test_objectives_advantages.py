import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, SettingsError, ShapeError
from rl_distill.objectives import ADVANTAGES, RewardedRows, dr_grpo_advantages, grpo_advantages
from rl_distill.objectives.advantages import (
    dr_grpo,
    gpg_advantages,
    lite_ppo_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    rloo_advantages,
)
from rl_distill.objectives.registry import function_with_options

ESTIMATES = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "opo": opo_advantages,
    "gpg": gpg_advantages,
    "grpo_passk": passk_advantages,
    "lite_ppo": lite_ppo_advantages,
    "maxrl": maxrl_advantages,
}


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


def by_paper(name, groups, *, eps=1e-6, divide_by_std=None):
    """Return the advantage of each session, by the formula of each paper; groups are lists of (reward, num_tokens)."""
    everything = [reward for group in groups for reward, _ in group]
    teaching = sum(len(group) for group in groups if len({reward for reward, _ in group}) > 1)
    found = []
    for group in groups:
        rewards = [reward for reward, _ in group]
        if len(set(rewards)) == 1:
            found.append([0.0] * len(group))
            continue
        mean, size, deviation = statistics.fmean(rewards), len(rewards), statistics.stdev(rewards) + eps
        second, best = sorted(rewards)[-2:]
        tokens = sum(count for _, count in group)
        found.append(
            {
                "grpo": [(r - mean) / deviation for r in rewards],
                "dr_grpo": [r - mean for r in rewards],
                "rloo": [r - (sum(rewards) - r) / (size - 1) for r in rewards],
                "opo": [r - sum(of * count for of, count in group) / tokens if tokens else r - mean for r in rewards],
                "gpg": [len(everything) / teaching * (r - mean) / (deviation if divide_by_std else 1) for r in rewards],
                "grpo_passk": [
                    (best - second) / (1 if divide_by_std is False else deviation) if r == best else 0.0
                    for r in rewards
                ],
                "lite_ppo": [(r - mean) / (statistics.stdev(everything) + eps) for r in rewards],
                "maxrl": [(r - mean) / mean if mean > 0 else 0.0 for r in rewards],
            }[name]
        )
    return found


GROUPS = {
    7: [(1.0, 2), (0.0, 1), (0.5, 4)],
    3: [(5.0, 3)],
    9: [(2.0, 1), (2.0, 2), (-1.0, 3)],  # the best is tied
    0: [(0.25, 1), (0.25, 1)],
    5: [(-3.0, 2), (-1.0, 1)],
    8: [(1.0, 0), (3.0, 2)],  # nothing of the first session trains
    4: [(0.5, 0), (2.5, 0)],
}
"""(reward, trained tokens) of sessions by prompt."""


@pytest.mark.parametrize("scale", [1.0, 2e-5], ids=["", "tiny"])
@pytest.mark.parametrize("which", [list(GROUPS), [3], [0, 3], [5]], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "lite_ppo", "maxrl")),
        *((name, {"eps": 0.5}) for name in ("grpo", "grpo_passk", "lite_ppo")),
        ("gpg", {"divide_by_std": True}),
        ("gpg", {"divide_by_std": True, "eps": 0.5}),
        ("grpo_passk", {"divide_by_std": False}),
    ],
)
def test_advantages_are_those_of_the_papers(name, options, which, scale):
    groups = {prompt: [(reward * scale, count) for reward, count in GROUPS[prompt]] for prompt in which}
    wanted = dict(zip(groups, by_paper(name, list(groups.values()), **options), strict=True))
    sessions = [(prompt, number) for prompt, group in groups.items() for number in range(len(group))]
    random.Random(1).shuffle(sessions)
    rewards = [groups[prompt][number][0] for prompt, number in sessions]
    counts = [groups[prompt][number][1] for prompt, number in sessions]
    expected = [wanted[prompt][number] for prompt, number in sessions]

    of_sessions = ESTIMATES[name]
    more = {"num_tokens": torch.tensor(counts)} if name == "opo" else {}
    group = torch.tensor([prompt for prompt, _ in sessions])
    found = of_sessions(torch.tensor(rewards, dtype=torch.float64), group, **more, **options)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)

    mask = [token > 0 for count in counts for token in range(count + 1)]  # each session has an untrained token too
    rows = rows_of(
        rewards,
        group.tolist(),
        [number for _, number in sessions],
        lengths=[count + 1 for count in counts],
        loss_mask=mask,
    )
    spread = function_with_options(ADVANTAGES, name, options)(rows)["advantages"].tolist()
    of_tokens = [[0.0] + [one] * count for one, count in zip(expected, counts, strict=True)]
    assert spread == pytest.approx([one for row in of_tokens for one in row], rel=1e-9, abs=1e-15)


def test_opo_counts_the_tokens_of_all_trajectories_of_a_session():
    rows = rows_of([9.0, 1.0, 0.0], [0, 0, 0], [0, 0, 1], [0, 1, 0], lengths=[2, 1, 1])
    assert ADVANTAGES.get("opo")(rows)["advantages"].tolist() == pytest.approx([0.25, 0.25, 0.25, -0.75])


def test_lite_ppo_does_not_scale_up_a_group_that_hardly_differs():
    # All rewards: mean 0.745, deviation sqrt((2 * 0.255^2 + 0.235^2 + 0.745^2) / 3) = 0.496756.
    rewards = torch.tensor([1.0, 0.98, 1.0, 0.0], dtype=torch.float64)
    found = lite_ppo_advantages(rewards, torch.tensor([0, 0, 1, 1]), eps=0.0)
    assert found.tolist() == pytest.approx([0.0201306, -0.0201306, 1.0065308, -1.0065308], abs=1e-6)


def test_maxrl_gives_zeros_to_groups_without_a_mean_above_zero():
    rewards, group = torch.tensor([-1.0, 1.0, -2.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert maxrl_advantages(rewards, group).tolist() == [0.0, 0.0, 0.0, 0.0, -1.0, 1.0]


def test_rewards_of_tokens_count_in_the_trajectorys():
    rows = rows_of([1.0, 0.0], [0, 0], [0, 1], lengths=[2, 1], loss_mask=[True, True, True])
    rows = replace(rows, columns={"token_rewards": torch.tensor([-0.25, -0.25, 0.0], dtype=torch.float64)})
    assert dr_grpo(rows)["advantages"].tolist() == [0.25, 0.25, -0.25]


def test_negative_eps_is_refused():
    with pytest.raises(SettingsError, match=r"eps of grpo_advantages must be a finite number of at least 0; found -1"):
        grpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), eps=-1.0)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -1e6, 0.0])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_group_with_equal_rewards_gets_exact_zeros(reward, size):
    # In floating point, the mean of seven times 0.1 is not 0.1; divided by eps, the difference would train.
    rewards = torch.full((size,), reward, dtype=torch.float64)
    group = torch.zeros(size, dtype=torch.int64)
    assert opo_advantages(rewards, group, torch.arange(size)).tolist() == [0.0] * size
    for name, estimate in ESTIMATES.items():
        assert name == "opo" or estimate(rewards, group).tolist() == [0.0] * size


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


@pytest.mark.parametrize("name", ESTIMATES)
def test_no_rows_and_sessions_have_no_advantages(name):
    assert ADVANTAGES.get(name)(rows_of([], [], []))["advantages"].shape == (0,)
    more = {"num_tokens": torch.zeros(0, dtype=torch.int64)} if name == "opo" else {}
    assert ESTIMATES[name](torch.zeros(0), torch.zeros(0), **more).tolist() == []


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
