"""Validation: estimates with confidence intervals from the responses to each prompt."""

from rl_metrics.validation.responses import ValidationResponses
from rl_metrics.validation.summary import headline, headline_name, summarize_validation

__all__ = ["ValidationResponses", "headline", "headline_name", "summarize_validation"]
