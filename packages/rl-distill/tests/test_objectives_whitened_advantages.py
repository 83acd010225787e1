import pytest
import torch

from rl_core.errors import DataError, SettingsError
from rl_distill.objectives import RewardedRows
from rl_distill.objectives.batch_advantages import gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline
from rl_distill.objectives.rewarded_rows import SESSION_RULES


def rows_of(rewards, *, lengths, group=None, loss_mask=None, session=None, **more):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return RewardedRows(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor(group or [0] * len(rewards)),
        session=torch.tensor(session or list(range(len(rewards)))),
        output=torch.arange(len(rewards)),
        loss_mask=torch.tensor(loss_mask) if loss_mask else torch.ones(int(offsets[-1]), dtype=torch.bool),
        offsets=offsets,
        **more,
    )


def whitened(values):
    values = torch.tensor(values, dtype=torch.float64)
    return ((values - values.mean()) / (values.var() + 1e-8).sqrt()).tolist()


def test_reinforce_plus_plus_equals_a_literal():
    # Rewards are discounted by gamma per trained token, backwards from the last one; masked tokens are no steps.
    mask = [False, True, False, True, True]
    found = reinforce_plus_plus(rows_of([1.0, 3.0], lengths=[4, 1], loss_mask=mask), gamma=0.5)
    assert found["returns"].tolist() == [0.0, 0.5, 0.0, 1.0, 3.0]
    a, b, c = whitened([0.5, 1.0, 3.0])
    assert found["advantages"].tolist() == pytest.approx([0.0, a, 0.0, b, c], rel=1e-12)


def test_reinforce_plus_plus_counts_rewards_of_tokens_where_they_are():
    columns = {"token_rewards": torch.tensor([-1.0, -2.0, 0.0], dtype=torch.float64)}
    found = reinforce_plus_plus(rows_of([4.0, 0.0], lengths=[2, 1], columns=columns))
    assert found["returns"].tolist() == [1.0, 2.0, 0.0]


def test_baseline_form_equals_a_literal():
    # Centered rewards 0.5 and -0.5, over three tokens and one.
    found = reinforce_plus_plus_baseline(rows_of([1.0, 0.0], lengths=[3, 1]))
    assert found["advantages"].tolist() == pytest.approx(whitened([0.5, 0.5, 0.5, -0.5]), rel=1e-12)


def test_each_trajectory_of_a_session_ends_with_the_sessions_reward():
    rows = rows_of([9.0, 1.0, 0.0], session=[0, 0, 1], lengths=[1, 2, 1])
    assert reinforce_plus_plus(rows)["returns"].tolist() == [1.0, 1.0, 1.0, 0.0]


def test_share_of_a_session_rule_is_taken_after_whitening():
    rows = rows_of([9.0, 1.0, 0.0], session=[0, 0, 1], lengths=[1, 1, 1], session_rule=SESSION_RULES.get("last_only"))
    a, _, c = whitened([1.0, 1.0, 0.0])
    for estimator in (reinforce_plus_plus, reinforce_plus_plus_baseline):
        assert estimator(rows)["advantages"].tolist() == pytest.approx([0.0, a, c], rel=1e-12)


def components(first, second):
    columns = {"reward/first": first, "reward/second": second}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


def test_gdpo_lets_no_component_drown_another():
    # The second component is a hundred times larger; after normalization both have the same weight.
    rows = rows_of([0.0] * 4, lengths=[1] * 4, row_columns=components([1, 0, 1, 0], [100, 100, 0, 0]))
    found = gdpo(rows)["advantages"].tolist()
    assert found == pytest.approx(whitened([2.0, 0.0, 0.0, -2.0]), abs=1e-5)
    weighted = gdpo(rows, weights={"first": 1.0, "second": 3.0})["advantages"].tolist()
    assert weighted == pytest.approx(whitened([4.0, 2.0, -2.0, -4.0]), abs=1e-5)
    assert gdpo(rows, weights={"first": 1.0})["advantages"].tolist() == pytest.approx(
        whitened([1, -1, 1, -1]), abs=1e-5
    )


def test_gdpo_needs_components():
    rows = rows_of([0.0, 1.0], lengths=[1, 1])
    with pytest.raises(DataError, match="'reward/NAME'; the batch has none"):
        gdpo(rows)
    with pytest.raises(DataError, match="needs the column 'reward/style'; the batch has reward/first"):
        gdpo(rows_of([0.0], lengths=[1], row_columns=components([1], [1])), weights={"style": 1.0})
    nan = components([1.0, float("nan")], [1.0, 1.0])
    with pytest.raises(DataError, match="'reward/first' must be finite"):
        gdpo(rows_of([0.0, 0.0], lengths=[1, 1], row_columns=nan))


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_impossible_discount_is_refused(gamma):
    with pytest.raises(
        SettingsError, match=r"gamma of reinforce_plus_plus must be a number of at least 0 and at most 1"
    ):
        reinforce_plus_plus(rows_of([1.0], lengths=[1]), gamma=gamma)
