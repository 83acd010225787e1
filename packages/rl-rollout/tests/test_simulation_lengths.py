"""Lengths of responses: distribution, maximum, and reproducibility from a seed."""

import numpy as np

from rl_rollout.simulation.workload import GroupLengths, Lengths

LOG_NORMAL = Lengths(median=400, sigma=1.0, maximum=28672)


def drawn(lengths: Lengths, *, seed: int = 0, groups: int = 600, group_size: int = 8) -> np.ndarray:
    source = GroupLengths(lengths, group_size=group_size, seed=seed)
    return np.array([source[group] for group in range(groups)])


def test_log_normal_lengths_have_their_median_and_spread() -> None:
    tokens = drawn(LOG_NORMAL)
    assert abs(np.median(tokens) / 400 - 1) < 0.06
    assert abs(np.log(tokens).std() - 1) < 0.05


def test_nothing_is_longer_than_the_maximum_and_scaling_comes_before_the_cut() -> None:
    plain, doubled = (drawn(Lengths(median=400, sigma=1.0, maximum=1000, scale=scale)) for scale in (1.0, 2.0))
    assert plain.max() == doubled.max() == 1000
    assert (doubled == np.minimum(1000, doubled)).all()
    assert (doubled == 1000).mean() > (plain == 1000).mean() > 0.05


def test_quantiles_are_met_and_the_logarithm_is_linear_between_them() -> None:
    tokens = drawn(Lengths(quantiles=((0, 10), (0.5, 100), (1, 10_000)), maximum=28672))
    assert abs((tokens <= 100).mean() - 0.5) < 0.03
    assert abs((tokens <= 1000).mean() - 0.75) < 0.03  # halfway from 100 to 10,000 on a log scale
    assert (tokens.min(), tokens.max() <= 10_000) == (10, True)


def test_a_prompts_responses_are_as_alike_as_asked() -> None:
    def likeness(correlation: float) -> float:
        scores = np.log(drawn(Lengths(median=400, sigma=1.0, maximum=10**9, group_correlation=correlation)))
        return float(np.corrcoef(scores[:, 0], scores[:, 1])[0, 1])

    assert abs(likeness(0.0)) < 0.1
    assert abs(likeness(0.6) - 0.6) < 0.1


def test_a_group_has_the_same_lengths_whatever_was_asked_for_before() -> None:
    forward = GroupLengths(LOG_NORMAL, group_size=4, seed=3)
    first = [forward[group] for group in range(300)]
    backward = GroupLengths(LOG_NORMAL, group_size=4, seed=3)
    assert [backward[group] for group in reversed(range(300))] == first[::-1]
    assert GroupLengths(LOG_NORMAL, group_size=4, seed=4)[0] != first[0]


def test_tokens_that_train_are_responses_and_a_prompt_for_each() -> None:
    source = GroupLengths(Lengths(median=5, sigma=0.0, maximum=10, prompt_tokens=3), group_size=4, seed=0)
    assert source[7] == [5, 5, 5, 5]
    assert source.num_tokens(7) == 4 * (5 + 3)
