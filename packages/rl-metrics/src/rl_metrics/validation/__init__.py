"""Validation: estimates with confidence intervals from the responses to each prompt."""

from rl_metrics.validation.paired import PairedDifference, paired_differences
from rl_metrics.validation.responses import ValidationResponses
from rl_metrics.validation.summary import headline, headline_name, summarize_validation

__all__ = [
    "PairedDifference",
    "ValidationResponses",
    "headline",
    "headline_name",
    "paired_differences",
    "summarize_validation",
]
