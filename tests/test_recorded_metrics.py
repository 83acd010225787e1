"""Every defined metric is recorded: in a recorded run, in a test's run, or not by a trainer, for a reason."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from rl_metrics.definitions import DEFINITIONS, MetricTable
from rl_metrics.trackers.jsonl import read_metrics

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"
"""Runs of the synchronous trainer, kept for the reports' tests."""

IN_TESTS = {
    "actor/distillation/{teacher}/aligned_fraction": "test_distillation_run.py",
    "actor/selected_fraction": "test_algorithms.py",  # clip_cov and kl_cov
    "critic/*": "test_algorithms.py",  # ppo
    "timing_s/values": "test_algorithms.py",
    "timing_s/update_critic": "test_algorithms.py",
    "timing_per_token_ms/*": "test_algorithms.py",
    "timing_s/old_log_prob": "test_algorithms.py",
    "training/rollout_*": "test_algorithms.py",  # recomputed logprobs
    "rollout_corr/*": "test_algorithms.py",
    "distribution/*": "test_algorithms.py",
    "perf/max_memory_*": "test_algorithms.py",  # a fake GPU
    "perf/memory_total_gb": "test_algorithms.py",
    "perf/gpu_utilization": "test_algorithms.py",
    "gateway/*": "test_agent_runs.py",
    "engine/*": "test_async_run_metrics.py",
    "fully_async/*": "test_async_run_metrics.py",
    "perf/*_tokens_per_s": "test_async_run_metrics.py",
    "timing_s/wait_rollouts": "test_async_run_metrics.py",
    "queue/*": "test_async_run_metrics.py",
    "validation/policy_version/*": "test_async_validation.py",
    "validation/is_exact": "test_async_validation.py",
    "test/*": "test_algorithms.py",
    "weights/size_gb": "test_lora_runs.py",
    "rollout/failed_rewards": "test_failed_sessions.py",
    "rollout/rescored_*": "test_algorithms.py",
    "rollout/num_rounds": "test_skip_run.py",  # refill
    "rollout/refused_groups": "test_algorithms.py",
    "rollout/made_up_groups": "test_algorithms.py",
    "rollout/replayed": "test_async_replay.py",
    "timing_s/load_rollouts": "test_skip_run.py",
    "timing_s/replayed_gen": "test_skip_run.py",
    "timing_s/save_checkpoint": "test_async_kills.py",
}
"""Metrics that need other settings or faults than the recorded runs', and a test whose runs record them."""

REASONS = {
    "other/{metric}": "`rl-metrics import` gives this name to unknown metrics of other systems",
    "training/global_step": "the step axis of Weights & Biases, and verl's metric",
    "sft/*": "for scripts of supervised training; the trainers record distillation.texts as actor/*",
    "reward/{component}/*": "needs a reward with components: rl_metrics.reductions.summarize_components",
    "tools/*": "needs tools: rl_metrics.reductions.summarize_tool_calls in both trainers",
    "perf/mfu/*": "needs metrics.peak_tflops: test_speeds.py of rl-trainer-parts",
    "perf/computed_tokens": "needs rows that share prefixes: test_shared_prefixes.py of rl-distill",
    "perf/saved_*": "needs rows that share prefixes: test_shared_prefixes.py of rl-distill",
    "nonfinite/{metric}": "needs values that are not finite: the Recorder's tests in rl-metrics",
    "router/*": "needs a mixture of experts: RankModel and rl_trainer_parts.learning.replay",
    "timing_s/replay_mismatch": "needs a mixture of experts: rl_trainer_parts.learning.replay",
    "val-core/*": "needs several samples of a problem: rl_metrics.validation in both trainers",
    "val-aux/*": "needs several samples of a problem: rl_metrics.validation in both trainers",
    "teacher/*": "needs teachers on GPUs: test_teacher_host.py of rl-async-trainer has a fake one",
    "perf/gpu/{n}/*": "needs several GPUs: test_gpu_metrics.py of rl-metrics",
}
"""Metrics of no such run, and why."""


@pytest.fixture(scope="module")
def unseen() -> list[str]:
    """Names of the definitions that no recorded run has."""
    names = {name for file in RECORDINGS.glob("*/metrics.jsonl") for row in read_metrics(file) for name in row.metrics}
    return [one.name for one in DEFINITIONS if not any(name in MetricTable([one]) for name in names)]


def test_every_metric_is_recorded_or_has_a_reason(unseen: list[str]) -> None:
    listed = (*IN_TESTS, *REASONS)
    assert [name for name in unseen if not any(fnmatchcase(name, pattern) for pattern in listed)] == []


def test_no_entry_is_out_of_date(unseen: list[str]) -> None:
    for pattern in (*IN_TESTS, *REASONS):
        assert any(fnmatchcase(name, pattern) for name in unseen), pattern
    assert [file for file in IN_TESTS.values() if not (HERE / file).is_file()] == []
