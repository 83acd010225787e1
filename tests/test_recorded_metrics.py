"""Every defined metric is recorded by a run of either trainer in our tests, or has a reason why not.

`nox -s tests` runs this file after all others, with the names that their runs recorded (tests/support/run_summary.py).
"""

import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from run_summary import METRICS_VARIABLE

from rl_metrics.definitions import DEFINITIONS, MetricTable

REASONS = {
    "other/{metric}": "`rl-metrics import` gives this name to unknown metrics of other systems",
    "training/rollout_logprobs_diff_*": "imported from TRL's logs",
    "perf/mfu/*": "needs metrics.peak_tflops: test_speeds.py of rl-trainer-parts",
    "nonfinite/{metric}": "needs values that are not finite: the Recorder's tests in rl-metrics",
    "teacher/max_memory_*": "needs teachers on GPUs: test_teacher_host.py of rl-async-trainer has a fake one",
    "teacher/memory_total_gb": "needs teachers on GPUs: test_teacher_host.py of rl-async-trainer has a fake one",
    "teacher/gpu_utilization": "needs teachers on GPUs: test_teacher_host.py of rl-async-trainer has a fake one",
    "*/gpu/{n}/*": "needs several GPUs: test_gpu_metrics.py of rl-metrics",
    "test/score": "needs a test set of which only some sources have acc: test_evaluation.py of rl-trainer-parts",
}
"""Metrics of no run in our tests, and why."""

BY_CHANCE = ("fully_async/count/dropped/{reason}",)
"""Metrics that need a kill or a slow group at the right moment, so that only some runs of our tests have them."""


@pytest.fixture(scope="module")
def unseen() -> list[str]:
    """Names of the definitions that no run recorded."""
    file = Path(os.environ.get(METRICS_VARIABLE, os.devnull))
    names = file.read_text().splitlines() if file.is_file() else []
    if not names:
        pytest.skip("reads what the runs of all other tests recorded: `nox -s tests` without arguments runs it")
    return [one.name for one in DEFINITIONS if not any(name in MetricTable([one]) for name in names)]


def test_every_metric_is_recorded_or_has_a_reason(unseen: list[str]) -> None:
    assert [name for name in unseen if not any(fnmatchcase(name, pattern) for pattern in (*REASONS, *BY_CHANCE))] == []


def test_no_reason_is_out_of_date(unseen: list[str]) -> None:
    assert [pattern for pattern in REASONS if not any(fnmatchcase(name, pattern) for name in unseen)] == []
