"""Validation: estimates with confidence intervals from the responses to each prompt."""
