"""Reports on hanging runs: who does not answer, and what each role does."""

from rl_metrics.hang.report import HANG_FILE, HangReport, describe_trouble, write_hang_report

__all__ = [
    "HANG_FILE",
    "HangReport",
    "describe_trouble",
    "write_hang_report",
]
