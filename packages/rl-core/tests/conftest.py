"""Skips the test files that import torch, an extra of rl-core, if it is not installed."""

from importlib.util import find_spec
from pathlib import Path

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if find_spec("torch") is None and "\nimport torch\n" in path.read_text()
]


def pytest_report_header() -> str | None:
    """Name the skipped test files."""
    return f"torch is not installed; left out: {', '.join(sorted(collect_ignore))}" if collect_ignore else None
