"""Compare two runs."""

import json

from tiny_run import TinyRun

from rl_metrics.trackers.jsonl import read_metrics

MEASURED = (
    *("timing_s/", "timing_per_token_ms/", "perf/", "agent_loop/", "memory/", "distribution/generate_s"),
    *("gateway/overhead_ms/", "rollout/rescored", "queue/"),
)
"""Metrics that depend on a clock, on engines that a replay does not use, or on when the queue is read."""

ASIDE = frozenset({"slowest_session", "health_finding", "health_finding_over"})
"""Events about a run's health, not its result; a tiny run is never healthy."""


def learnt(run: TinyRun, *, step: int = 4) -> dict[str, bytes]:
    """Return every file of the last checkpoint without wall times and without an adapter's path to its base."""
    folder = run.run_folder / "checkpoints" / f"step_{step}"
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    timed = ("trainer.json", "manifest.json")
    place = str(run.folder).encode()
    return {
        str(file.relative_to(folder)): file.read_bytes().replace(place, b"FOLDER")
        for file in files
        if file.name not in timed
    }


def metrics_without_clock(run: TinyRun) -> list[tuple[int, dict[str, float]]]:
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    return [
        (row.step, {name: value for name, value in row.metrics.items() if not name.startswith(MEASURED)})
        for row in rows
    ]


def differing_metrics(run: TinyRun, expected: TinyRun) -> list[str]:
    """Return a line for each metric that differs."""
    found, wanted = dict(metrics_without_clock(run)), dict(metrics_without_clock(expected))
    return [
        f"step {step}: {name} is {found.get(step, {}).get(name)!r}; expected {wanted.get(step, {}).get(name)!r}"
        for step in sorted(found.keys() | wanted.keys())
        for name in sorted(found.get(step, {}).keys() | wanted.get(step, {}).keys())
        if found.get(step, {}).get(name) != wanted.get(step, {}).get(name)
    ]


def summary(run: TinyRun) -> dict[str, float]:
    found = json.loads((run.run_folder / "summary.json").read_text())
    return {
        name: value
        for name, value in found.items()
        if name not in ("wall_s", "steps_wall_s", "samples_per_s", "checkpoint", "best_checkpoint")
    }


def assert_equal_runs(run: TinyRun, expected: TinyRun) -> None:
    assert differing_metrics(run, expected) == []
    assert learnt(run) == learnt(expected)
    assert summary(run) == summary(expected)
