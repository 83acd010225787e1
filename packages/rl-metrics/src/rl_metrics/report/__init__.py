"""Runs as a page: one HTML file, or served while they go on."""

from rl_metrics.report.writing import write_report

__all__ = ["write_report"]
