"""Conformance checks for custom objectives (docs/guides/objectives.md).

from rl_distill.testing import check_policy_loss

def test_my_loss():
    check_policy_loss(my_loss)
"""

from rl_distill.testing.advantages import check_advantage, example_rows
from rl_distill.testing.examples import ExampleBatch, example_batch
from rl_distill.testing.policy import check_objective, check_policy_loss
from rl_distill.testing.results import ConformanceError
from rl_distill.testing.values import check_value_loss

__all__ = [
    "ConformanceError",
    "ExampleBatch",
    "check_advantage",
    "check_objective",
    "check_policy_loss",
    "check_value_loss",
    "example_batch",
    "example_rows",
]
