"""Reports on hanging runs: each role's activity, the waits between roles, and the cause."""

from rl_metrics.hang.report import HANG_FILE, GroupRow, HangReport, write_hang_report
from rl_metrics.hang.verdict import judge_hang

__all__ = [
    "HANG_FILE",
    "GroupRow",
    "HangReport",
    "judge_hang",
    "write_hang_report",
]
