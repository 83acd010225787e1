"""The metrics benchmark: its table for a main job of known duration, and the calls it times."""

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("metrics")


@pytest.fixture
def report(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    def main_jobs(settings: Path, folder: Path, *, steps: int, is_quick: bool) -> dict[str, object]:
        assert (steps, is_quick) == (5, True)
        return {
            name: benchmark.MainJob(
                step_s=2.0,
                metrics_s=0.1 if trackers else 0.01,
                parts_ms={"Fanout.log": 10.0},
                num_metrics=100,
                closing_s=1.0,
                probes_s=0.004,
                children_cpu_s=0.5,
            )
            for name, trackers in benchmark.TRACKERS.items()
        }

    monkeypatch.setattr(benchmark, "main_jobs", main_jobs)
    options = benchmark.parse(["--quick"])
    assert isinstance(options, argparse.Namespace)
    found: dict[str, object] = json.loads(json.dumps(benchmark.measure(options, tmp_path)))
    return found


def test_the_table_has_what_the_issue_names(report: dict[str, object]) -> None:
    rows = {row["workload"]: row for row in report["results"]}  # type: ignore[attr-defined]
    assert list(rows) == ["main_job", "main_job_all_trackers", "validation_100k", "report_50k"]
    assert {row["system"] for row in rows.values()} == {"ours"}
    assert rows["main_job"]["per_step_ms"] == pytest.approx(10.0)
    assert rows["main_job"]["share_of_step"] == pytest.approx(0.005)
    assert rows["main_job_all_trackers"]["share_of_step"] == pytest.approx(0.05)
    assert rows["main_job"]["probes_ms"] == pytest.approx(4.0)
    assert rows["validation_100k"]["per_step_ms"] > 0
    assert rows["report_50k"]["size_mb"] > 0
    assert [target["is_met"] for target in report["targets"]] == [True, True, True]  # type: ignore[attr-defined]


def test_it_prints_its_table(
    benchmark: ModuleType, report: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.print_report(report)
    said = capsys.readouterr().out
    assert "main_job: a step of 2000 ms, of that" in said
    assert "4.0 ms a step of answering probes, 1.0 s to close" in said


def test_what_it_times_is_there_to_be_timed(benchmark: ModuleType) -> None:
    timing = load_benchmark("_metrics_timing")
    assert benchmark.OURS == "ours"
    assert timing.ENTRIES
    assert all(callable(getattr(owner, name)) for owner, name in timing.ENTRIES)
    clock = timing.Clock()
    inner = clock.timed("inner", lambda: 1)
    assert clock.timed("outer", lambda: inner() + 1)() == 2
    assert list(clock.called_s) == ["outer"], "a call within another counts as the outer one's"


def test_too_few_steps_are_refused(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse(["--steps", "4"])
    assert "--steps" in capsys.readouterr().err
