"""Definitions of all metrics: name, unit, reduction, meaning, healthy values."""

from rl_metrics.definitions.definition import Band, Metric, MetricTable
from rl_metrics.definitions.table import DEFINITIONS

__all__ = ["DEFINITIONS", "Band", "Metric", "MetricTable"]
