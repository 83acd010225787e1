"""The default health rules."""

from rl_metrics.health.convergence_rules import CONVERGENCE
from rl_metrics.health.efficiency_rules import EFFICIENCY
from rl_metrics.health.mismatch_rules import AGREEMENT
from rl_metrics.health.plateau_rule import PLATEAU
from rl_metrics.health.rules import Rule
from rl_metrics.health.spread_rules import SPREAD
from rl_metrics.health.stability_rules import STABILITY
from rl_metrics.health.task_rules import TASK

GUIDE: tuple[Rule, ...] = (*TASK, PLATEAU, *CONVERGENCE, *AGREEMENT, *STABILITY, *SPREAD, *EFFICIENCY)
"""Rules by side; findings that do not explain each other are ordered as their rules."""
