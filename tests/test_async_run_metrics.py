"""An asynchronous run emits the metrics that its table defines."""

from collections.abc import Collection
from pathlib import Path

from async_runs import train_async_here
from fake_gpu import fake_gpu, figures
from tiny_run import REWARDS_PER_STEP, make_tiny_run

from rl_metrics.definitions.async_training import ASYNC
from rl_metrics.definitions.definition import MetricTable
from rl_metrics.run_files.rollout_log import read_rollouts
from rl_metrics.trackers.jsonl import read_histograms, read_metrics

STEPS = 4
NEED_A_CAUSE = {
    "fully_async/count/dropped/{reason}": "groups that fail, are refused, lost or too stale",
    "perf/teacher_tokens_per_s": "teachers",
}


def unsaid(names: Collection[str]) -> list[str]:
    """Return the asynchronous trainer's metrics that match none of the names."""
    tables = {metric.name: MetricTable([metric]) for metric in ASYNC}
    return [metric for metric, table in tables.items() if not any(name in table for name in names)]


def test_a_short_run_emits_every_metric_that_needs_no_cause(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    with fake_gpu():
        assert train_async_here(run, trainer__steps=STEPS) == 0
    rows = [row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step]
    assert unsaid({name for row in rows for name in row}) == sorted(NEED_A_CAUSE)
    last = rows[-1]
    assert last.items() >= figures("perf").items() | figures("engine").items()
    assert last["fully_async/count/total_generated_samples"] >= STEPS * REWARDS_PER_STEP
    assert 0 < last["fully_async/count/stale_trajectory_processed"] <= last["fully_async/count/total_generated_samples"]
    assert all(
        row["fully_async/count/staleness_samples"]
        == row["fully_async/queue/inflight_groups"] + row["fully_async/queue/ready_groups"]
        for row in rows
    )
    assert all((row["fully_async/queue/bytes"] > 0) == (row["fully_async/queue/rows"] > 0) for row in rows)
    assert any(row["memory/queue_gb"] > 0 for row in rows)
    assert rows[0]["memory/controller_gb"] > 0
    assert {row["queue/rows"] == row["fully_async/queue/rows"] for row in rows} == {True}
    histograms = read_histograms(run.run_folder / "histograms.jsonl")
    assert [row.step for row in histograms] == list(range(1, STEPS + 1))
    assert any("distribution/generate_s" in row.histograms for row in histograms), "of steps in which some were made"
    for row in histograms:
        assert row.histograms["distribution/reward"].count == REWARDS_PER_STEP
        assert row.histograms["distribution/entropy"].min > 0
        assert row.histograms["distribution/log_ratio"].count == row.histograms["distribution/advantage"].count
    rollouts = list(read_rollouts(run.run_folder / "rollouts.jsonl"))
    assert [row.step for row in rollouts] == sorted(row.step for row in rollouts)
    assert {row.step for row in rollouts} == set(range(1, STEPS + 1))
    for row in rollouts:
        assert row.columns.keys() >= {"token_ids", "versions", "rollout_logprobs", "policy_logprobs", "entropy"}
        assert "".join(row.tokens) == row.response
        sampled = [token for token, is_sampled in enumerate(row.mask) if is_sampled]
        assert sampled
        assert all(row.columns["entropy"][token] > 0 for token in sampled)
        assert sampled
        assert all(0 <= row.columns["versions"][token] <= row.policy_version for token in sampled)
