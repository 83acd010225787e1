"""Validation: estimates with confidence intervals from the responses to each prompt."""

from rl_metrics.validation.summary import ValidationResponses, headline, is_headline_accuracy, summarize_validation

__all__ = [
    "ValidationResponses",
    "headline",
    "is_headline_accuracy",
    "summarize_validation",
]
