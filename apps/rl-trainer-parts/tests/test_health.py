"""Health checks during training: their files and messages, and when a run pauses."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl_metrics.health import Verdict
from rl_metrics.run_files.events import EventLog, read_events
from rl_metrics.trackers.console import ConsoleTracker
from rl_metrics.trackers.jsonl import JsonlTracker
from rl_metrics.trackers.tracker import Fanout
from rl_trainer_parts.reporting.health import FILE, HealthWatch
from rl_trainer_parts.run.folder import RunFolder, RunState
from rl_trainer_parts.run.lifecycle import RunLifecycle
from rl_trainer_parts.run.stopping import StopSignal
from rl_trainer_parts.settings.sources import build_settings

HEALTHY = {"actor/ppo_kl": 0.01, "actor/entropy": 0.3}
SICK = {"actor/ppo_kl": 0.2, "actor/entropy": 0.3}


class Run:
    """A run's folder with its trackers, as in both trainers; a second one for the same folder resumes the run."""

    def __init__(self, folder: Path, *, last_step: int = 100, **settings: object) -> None:
        self.folder = folder
        self.said = io.StringIO()
        self.events = EventLog(folder / "events.jsonl")
        self.stop = StopSignal()
        self.trackers = Fanout({"jsonl": JsonlTracker(folder / "metrics.jsonl")})
        values = {"policy": {"path": "p"}, "prompts": {"train": "t"}, "trainer": {"steps": last_step}}
        watch = HealthWatch(
            build_settings({**values, "health": settings}),
            folder,
            console=ConsoleTracker(console=Console(file=self.said, width=1000)),
            events=self.events,
            pause=self.stop.pause,
        )
        self.trackers.add("health", watch)

    def train(self, first: int, last: int, metrics: dict[str, float]) -> None:
        for step in range(first, last + 1):
            self.trackers.log(step, metrics)

    def verdict(self) -> Verdict:
        return Verdict.from_json(json.loads((self.folder / FILE).read_text()))

    def told(self) -> list[tuple[str, str]]:
        found = [event for event in read_events(self.folder / "events.jsonl") if event["event"].startswith("health")]
        return [(event["event"], event["rule"]) for event in found]


def test_a_healthy_run_is_written_down_and_silent(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1, 9, HEALTHY)
    assert not (tmp_path / FILE).exists()
    run.train(10, 10, HEALTHY)
    assert (run.verdict().status, run.verdict().step) == ("ok", 10)
    assert run.said.getvalue() == ""
    assert run.told() == []


def test_a_finding_is_told_once_and_again_when_it_is_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1, 30, SICK)
    assert run.told() == [("health_finding", "kl_high")]
    (line,) = run.said.getvalue().splitlines()
    assert line.startswith("health: critical: The policy moves too far within a step. (kl_high, since step 1;")
    assert "Likely: learning rate too high. Try: divide the learning rate by three." in line
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["level"], event["step"], event["since_step"]) == ("warning", 10, 1)
    assert event["causes"][0] == "learning rate too high"
    run.train(31, 50, HEALTHY)
    assert run.told() == [("health_finding", "kl_high"), ("health_finding_over", "kl_high")]


def test_the_last_step_is_judged_and_so_is_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, last_step=13)
    run.train(1, 13, HEALTHY)
    assert run.verdict().step == 13
    other = Run(tmp_path / "stopped")
    other.train(1, 13, HEALTHY)
    assert other.verdict().step == 10
    other.trackers.close()
    assert other.verdict().step == 13


def test_the_end_of_a_failed_run_has_its_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1, 10, HEALTHY)
    run.events.write("run_failed", error="WeightProofError: tensor lm_head differs", step=10)
    run.trackers.close()
    assert [finding.rule for finding in run.verdict().findings] == ["weights_proof"]
    assert run.told() == []


def test_late_metrics_count(tmp_path: Path) -> None:
    run = Run(tmp_path, last_step=12)
    for step in range(1, 13):
        run.trackers.log(step, {"critic/score/mean": 0.4 + 0.04 * step})
    for step in range(2, 13, 2):
        run.trackers.log_late(step, {"val-core/arithmetic/reward/mean@1": 0.4})
    assert run.verdict().findings == ()
    run.trackers.close()
    assert [finding.rule for finding in run.verdict().findings] == ["overfitting"]


@pytest.mark.parametrize("pause_on", ["kl_high", "critical", "warning"])
def test_a_finding_pauses_the_run(tmp_path: Path, pause_on: str) -> None:
    run = Run(tmp_path, pause_on=(pause_on,))
    run.train(1, 9, SICK)
    run.stop.check()
    run.train(10, 10, SICK)
    assert run.stop.pause_reason == "health.pause_on: kl_high"
    assert run.stop.exit_status == 3


@pytest.mark.parametrize(
    ("metrics", "settings"),
    [
        (SICK, {}),
        (SICK, {"pause_on": ("reward_zero",)}),
        ({"actor/grad_norm": 5.0}, {"pause_on": ("critical",)}),  # only a warning
        (SICK, {"pause_on": ("critical",), "thresholds": {"kl_high.max": 0.3}}),
        (SICK, {"pause_on": ("critical",), "off": ("kl_high",)}),
        (SICK, {"pause_on": ("critical",), "last_step": 10}),
    ],
)
def test_a_run_goes_on_otherwise(tmp_path: Path, metrics: dict[str, float], settings: dict[str, object]) -> None:
    run = Run(tmp_path, **settings)
    run.train(1, 10, metrics)
    assert run.verdict().step == 10
    assert run.stop.pause_reason is None


def test_a_resumed_run_has_as_many_steps_to_recover(tmp_path: Path) -> None:
    run = Run(tmp_path, pause_on=("critical",))
    run.train(1, 10, SICK)
    assert run.stop.pause_reason is not None
    run.trackers.close()
    sick = Run(tmp_path, pause_on=("critical",))
    sick.train(11, 19, SICK)
    assert sick.stop.pause_reason is None
    sick.train(20, 20, SICK)
    assert sick.stop.pause_reason == "health.pause_on: kl_high"
    assert sick.told() == [("health_finding", "kl_high")], "it is not told again"


def test_a_run_that_goes_back_has_as_many_steps_too(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 18, SICK)
    run = Run(tmp_path, pause_on=("critical",))  # killed after step 18 and resumed from the checkpoint of step 15
    run.train(16, 24, SICK)
    assert run.verdict().step == 20
    assert run.stop.pause_reason is None
    run.train(25, 30, SICK)
    assert run.stop.pause_reason is not None


def test_a_resumed_run_that_recovers_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, pause_on=("critical",))
    run.train(1, 10, SICK)
    well = Run(tmp_path, pause_on=("critical",))
    well.train(11, 40, HEALTHY)
    assert well.stop.pause_reason is None
    assert well.told() == [("health_finding", "kl_high"), ("health_finding_over", "kl_high")]
    assert len(well.verdict().checks) > 30


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"status": "ok"}', b"\xff", b"[" * 100_000])
def test_a_torn_verdict_of_before_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    run = Run(tmp_path)
    run.train(1, 10, SICK)
    assert run.told() == [("health_finding", "kl_high")]


def test_a_fault_of_its_own_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr("rl_trainer_parts.reporting.health.judge", fail)
    run = Run(tmp_path)
    run.train(1, 30, SICK)
    assert run.trackers.active == ("jsonl",)
    assert run.stop.pause_reason is None


def test_metrics_that_cannot_be_read_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(13, "denied", str(path))

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr("rl_trainer_parts.reporting.health.read_history", fail)
    settings = build_settings({"policy": {"path": "p"}, "prompts": {"train": "t", "validation": "v"}})
    console = ConsoleTracker(console=Console(file=io.StringIO()))
    tokenizer: Any = None
    lifecycle = RunLifecycle(settings, RunFolder(tmp_path), console, tokenizer)
    active = []

    async def train(*_: object) -> None:
        active.append(lifecycle.trackers.active)

    assert asyncio.run(lifecycle.launch(train, RunState)) == 0
    assert active == [("report", "jsonl", "console")]
    events = [event["event"] for event in read_events(tmp_path / "events.jsonl")]
    assert events == ["health_failed", "run_started", "run_finished"]
