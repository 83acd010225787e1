"""Sessions with several trajectories of one token each: rewards 4 and 2 in one session, 1 in the other."""

import pytest
import torch

from rl_core.errors import ShapeError
from rl_distill.objectives import SESSION_RULES, RewardedRows, SessionCredit
from rl_distill.objectives.advantages import dr_grpo


def advantages(rule, *, output=(0, 1, 0)):
    rows = RewardedRows(
        rewards=torch.tensor([4.0, 2.0, 1.0]),
        group=torch.zeros(3, dtype=torch.int64),
        session=torch.tensor([0, 0, 1]),
        output=torch.tensor(output),
        loss_mask=torch.ones(3, dtype=torch.bool),
        offsets=torch.arange(4),
        session_rule=rule,
    )
    return dr_grpo(rows)["advantages"].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("last", [0.5, 0.5, -0.5]),  # session rewards 2 and 1
        ("last_only", [0.0, 0.5, -0.5]),
        ("mean", [1.0, 1.0, -1.0]),  # session rewards 3 and 1
        ("each", [5 / 3, -1 / 3, -4 / 3]),  # 4, 2 and 1 count separately
    ],
)
def test_rules_give_the_advantages_of_literals(name, expected):
    assert advantages(SESSION_RULES.get(name)) == pytest.approx(expected, rel=1e-6)


def test_which_is_last_is_told_by_the_output():
    assert advantages(SESSION_RULES.get("last"), output=(1, 0, 0)) == [1.5, 1.5, -1.5]
    assert advantages(SESSION_RULES.get("last_only"), output=(1, 0, 0)) == [1.5, 0.0, -1.5]


def test_a_rule_of_ones_own():
    def best(rows):
        of_sessions = torch.full((2,), -torch.inf).scatter_reduce(0, rows.session, rows.rewards, "amax")
        return SessionCredit(unit=rows.session, rewards=of_sessions[rows.session], share=torch.ones_like(rows.rewards))

    assert advantages(best) == [1.5, 1.5, -1.5]


def test_a_rule_that_gives_other_shapes_is_refused():
    def wrong(rows):
        return SessionCredit(unit=rows.session, rewards=rows.rewards[:1], share=rows.rewards)

    with pytest.raises(ShapeError, match="rewards must have shape"):
        advantages(wrong)
