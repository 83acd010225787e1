import math
import random

import pytest
import torch

from rl_core.errors import DataError, SettingsError
from rl_distill.objectives import RewardedRows
from rl_distill.objectives.batch_advantages import gae, optimal_token_baseline, remax
from rl_distill.objectives.rewarded_rows import SESSION_RULES


def rows_of(rewards, *, lengths, session=None, loss_mask=None, columns=None, row_columns=None, rule="last"):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return RewardedRows(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group=torch.zeros(len(rewards), dtype=torch.int64),
        session=torch.tensor(session or list(range(len(rewards)))),
        output=torch.arange(len(rewards)),
        loss_mask=torch.tensor(loss_mask) if loss_mask else torch.ones(int(offsets[-1]), dtype=torch.bool),
        offsets=offsets,
        columns={name: torch.tensor(values, dtype=torch.float64) for name, values in (columns or {}).items()},
        row_columns={name: torch.tensor(values, dtype=torch.float64) for name, values in (row_columns or {}).items()},
        session_rule=SESSION_RULES.get(rule),
    )


def test_gae_equals_a_literal():
    # Trained tokens of the first row have values 1 and 3; the masked one between is no step. gamma = lambda = 0.5.
    # Errors: 0.5 * 3 - 1 = 0.5 and 2 - 3 = -1; advantages 0.5 + 0.25 * -1 and -1. Second row: 4 - 1.
    rows = rows_of(
        [2.0, 4.0],
        lengths=[4, 1],
        loss_mask=[False, True, False, True, True],
        columns={"values": [7.0, 1.0, 9.0, 3.0, 1.0]},
    )
    found = gae(rows, gamma=0.5, lam=0.5, whiten=False)
    assert found["advantages"].tolist() == [0.0, 0.25, 0.0, -1.0, 3.0]
    assert found["returns"].tolist() == [0.0, 1.25, 0.0, 2.0, 4.0]


def test_whitening_leaves_the_returns():
    rows = rows_of([1.0, 0.0], lengths=[2, 3], columns={"values": [0.1, 0.2, 0.3, 0.4, 0.5]})
    plain, whitened = gae(rows, whiten=False), gae(rows)
    assert whitened["returns"].tolist() == plain["returns"].tolist()
    assert whitened["advantages"].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert whitened["advantages"].var().item() == pytest.approx(1.0, rel=1e-6)


def test_gae_of_a_perfect_critic_is_zero_and_of_a_silent_one_the_return():
    perfect = rows_of([3.0], lengths=[3], columns={"values": [3.0, 3.0, 3.0]})
    assert gae(perfect, whiten=False)["advantages"].tolist() == [0.0, 0.0, 0.0]
    silent = rows_of([3.0], lengths=[3], columns={"values": [0.0] * 3, "token_rewards": [-1.0, 0.0, 0.0]})
    assert gae(silent, whiten=False)["advantages"].tolist() == [2.0, 3.0, 3.0]


def test_sessions_of_several_trajectories_in_gae():
    columns = {"values": [0.0] * 3}
    last = gae(rows_of([9.0, 1.0], session=[0, 0], lengths=[1, 2], columns=columns), whiten=False)
    assert last["advantages"].tolist() == [1.0, 1.0, 1.0]
    only = gae(rows_of([9.0, 1.0], session=[0, 0], lengths=[1, 2], columns=columns, rule="last_only"), whiten=False)
    assert only["advantages"].tolist() == [0.0, 1.0, 1.0]
    assert only["returns"].tolist() == [1.0, 1.0, 1.0], "the critic learns from all"
    each = gae(rows_of([9.0, 1.0], session=[0, 0], lengths=[1, 2], columns=columns, rule="each"), whiten=False)
    assert each["advantages"].tolist() == [9.0, 1.0, 1.0]


def test_a_row_without_trained_tokens_is_left_out():
    rows = rows_of([5.0, 1.0], lengths=[2, 1], loss_mask=[False, False, True], columns={"values": [0.0] * 3})
    assert gae(rows, whiten=False)["advantages"].tolist() == [0.0, 0.0, 1.0]


def test_gae_needs_values():
    with pytest.raises(DataError, match="needs the column 'values'; the batch has none"):
        gae(rows_of([1.0], lengths=[1]))


@pytest.mark.parametrize("options", [{"gamma": 1.5}, {"lam": -0.5}])
def test_impossible_discounts_are_refused(options):
    with pytest.raises(
        SettingsError, match=rf"{next(iter(options))} of gae must be a number of at least 0 and at most 1"
    ):
        gae(rows_of([1.0], lengths=[1], columns={"values": [0.0]}), **options)


def test_remax_equals_a_literal():
    rows = rows_of([1.0, 0.0], lengths=[2, 1], row_columns={"reward_baseline": [0.25, 0.25]})
    assert remax(rows)["advantages"].tolist() == [0.75, 0.75, -0.25]


def test_remax_needs_a_finite_baseline():
    with pytest.raises(DataError, match="needs the column 'reward_baseline'"):
        remax(rows_of([1.0], lengths=[1]))
    with pytest.raises(DataError, match="'reward_baseline' must be finite"):
        remax(rows_of([1.0], lengths=[1], row_columns={"reward_baseline": [float("nan")]}))


def paper_otb(trajectories):
    """OTB, equations of arXiv:2602.07078 over (reward, distributions, chosen tokens) of one group, token by token.

    The energy of a token is the squared norm of its logits' gradient, ||onehot - distribution||^2.
    """
    energies = []
    for _, distributions, chosen in trajectories:
        total, own = 0.0, []
        for distribution, token in zip(distributions, chosen, strict=True):
            total += sum(((place == token) - p) ** 2 for place, p in enumerate(distribution))
            own.append(total)
        energies.append(own)
    found = []
    for reward, _, chosen in trajectories:
        for step in range(len(chosen)):
            others = [(r, w[step]) for (r, _, _), w in zip(trajectories, energies, strict=True) if step < len(w)]
            baseline = sum(r * w for r, w in others) / sum(w for _, w in others) if len(others) > 1 else 0.0
            found.append(reward - baseline)
    return found


def random_trajectories(generator, lengths):
    for length in lengths:
        weights = [[generator.random() ** 3 for _ in range(5)] for _ in range(length)]
        distributions = [[one / sum(each) for one in each] for each in weights]
        yield generator.gauss(0, 1), distributions, [generator.randrange(5) for _ in range(length)]


def test_otb_has_the_papers_numbers():
    trajectories = list(random_trajectories(random.Random(0), [4, 2, 6, 4]))
    rows = rows_of(
        [reward for reward, _, _ in trajectories],
        lengths=[len(chosen) for _, _, chosen in trajectories],
        columns={
            "old_logprobs": [math.log(p[i]) for _, ps, ids in trajectories for p, i in zip(ps, ids, strict=True)],
            "sum_pi_squared": [sum(one**2 for one in p) for _, ps, _ in trajectories for p in ps],
        },
    )
    found = optimal_token_baseline(rows)["advantages"].tolist()
    assert found == pytest.approx(paper_otb(trajectories), abs=1e-5)
    assert found[-6:-4] == pytest.approx([trajectories[2][0]] * 2), "no other trajectory reaches its last two tokens"


def test_otb_places_tokens_by_the_trained_ones_before_them():
    energy = {"old_logprobs": [math.log(0.5)] * 5, "sum_pi_squared": [0.5] * 5}
    plain = optimal_token_baseline(rows_of([1.0, 0.0], lengths=[2, 3], columns=energy))["advantages"].tolist()
    # The same energy everywhere: the mean of the returns, and 0 for the token that only the second row has.
    assert plain == pytest.approx([0.5, 0.5, -0.5, -0.5, 0.0], abs=1e-6)
    columns = {name: [values[0], 9.0, *values[1:]] for name, values in energy.items()}
    mask = [True, False, True, True, True, True]  # a tool's reply in the first row
    gapped = optimal_token_baseline(rows_of([1.0, 0.0], lengths=[3, 3], loss_mask=mask, columns=columns))["advantages"]
    assert gapped.tolist() == [plain[0], 0.0, *plain[1:]]


def test_otb_weighs_energy_by_the_squared_correction():
    columns = {"old_logprobs": [math.log(0.5)] * 2, "sum_pi_squared": [0.5] * 2, "correction_weights": [2.0, 1.0]}
    # Energies 0.5 * 4 and 0.5: the baseline is 4 / 5 of the first reward.
    found = optimal_token_baseline(rows_of([1.0, 0.0], lengths=[1, 1], columns=columns))["advantages"]
    assert found.tolist() == pytest.approx([0.2, -0.8], abs=1e-6)


def test_otb_of_a_lone_trajectory_is_its_return_and_of_certain_tokens_too():
    columns = {"old_logprobs": [-1.0, -1.0], "sum_pi_squared": [0.4, 0.4]}
    assert optimal_token_baseline(rows_of([2.0], lengths=[2], columns=columns))["advantages"].tolist() == [2.0, 2.0]
    certain = {"old_logprobs": [0.0, 0.0], "sum_pi_squared": [1.0, 1.0]}
    found = optimal_token_baseline(rows_of([2.0, 1.0], lengths=[1, 1], columns=certain))["advantages"]
    assert found.tolist() == [2.0, 1.0]


def test_otb_divides_by_the_energy_and_a_floor():
    columns = {"old_logprobs": [0.0, 0.0], "sum_pi_squared": [1 + 1e-8] * 2}  # energies of 1e-8 each
    found = optimal_token_baseline(rows_of([3.0, 0.0], lengths=[1, 1], columns=columns))["advantages"]
    assert found.tolist() == pytest.approx([2.0, -1.0], rel=1e-6)
