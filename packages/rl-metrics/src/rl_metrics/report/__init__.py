"""HTML reports of runs, as one file or served live."""

from rl_metrics.report.writing import write_report

__all__ = ["write_report"]
