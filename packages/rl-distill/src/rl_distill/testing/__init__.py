"""Conformance checks for custom objectives (docs/guides/objectives.md).

from rl_distill.testing import check_policy_loss

def test_my_loss():
    check_policy_loss(my_loss)
"""

from rl_distill.testing.advantages import check_advantage, example_rows
from rl_distill.testing.objectives import check_objective, check_policy_loss, check_value_loss
from rl_distill.testing.rules import ConformanceError, example_batch

__all__ = [
    "ConformanceError",
    "check_advantage",
    "check_objective",
    "check_policy_loss",
    "check_value_loss",
    "example_batch",
    "example_rows",
]
