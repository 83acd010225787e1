"""Token probes at each validation of an asynchronous run; a failed probe does not stop the run."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_faults import SUPPORT
from async_runs import train_async_here
from probed_roles import DIED
from run_equality import learnt
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run, train_here

from rl_metrics.run_files.events import read_events
from rl_metrics.run_files.json_lines import read_json_lines
from rl_metrics.run_files.run_record import ProbeRow, open_run
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.transformers import TransformersEngine

ON_POLICY = {"schedule__max_staleness": 0, "schedule__sync_every": 1}
STEPS = 4
VALIDATED = [0, 2, 4]
COUNT = 3
NAMED = {"metrics__probe_tokens": '[";"]'}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def runs(inputs: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    """Train the same run with validation by the synchronous trainer, the engines and the learner."""
    found = {name: copy_tiny_run(inputs, tmp_path_factory.mktemp(name)) for name in ("trainer", "engines", "learner")}
    assert train_here(found["trainer"], metrics__probes=COUNT, trainer__steps=STEPS, **NAMED) == 0
    for name in ("engines", "learner"):
        settings = {"metrics__probes": COUNT, "trainer__steps": STEPS, "schedule__validate_on": name, **ON_POLICY}
        assert train_async_here(found[name], **settings, **NAMED) == 0
    return found


def probes_of(run: TinyRun) -> tuple[ProbeRow, ...]:
    return open_run(run.run_folder).probes


def by_validation(run: TinyRun) -> list[tuple[int, int, list[tuple[str, int, str]]]]:
    """Return the step, policy version and probed tokens of each validation."""
    found: dict[tuple[int, int], list[tuple[str, int, str]]] = {}
    for row in probes_of(run):
        found.setdefault((row.step, row.policy_version), []).append((row.probe, row.position, row.token))
    return [(*key, tokens) for key, tokens in found.items()]


@pytest.mark.parametrize("validate_on", ["engines", "learner"])
def test_the_same_tokens_get_the_same_answers_as_in_the_synchronous_trainer(
    runs: dict[str, TinyRun], validate_on: str
) -> None:
    run, sync = runs[validate_on], runs["trainer"]
    assert [(step, version) for step, version, _ in by_validation(sync)] == [(step, step) for step in VALIDATED]
    assert by_validation(run) == by_validation(sync)
    for _, _, tokens in by_validation(run):
        named = [text for name, _, text in tokens if "=" in name]
        assert len(tokens) == COUNT + len(named)
        assert {*named} == {";"}
    for row, expected in zip(probes_of(run), probes_of(sync), strict=True):
        assert (row.prompt, row.response) == (expected.prompt, expected.response)
        assert row.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [token for token, _ in row.candidates] == [token for token, _ in expected.candidates]


def test_what_the_policy_thinks_changes_as_it_learns(runs: dict[str, TinyRun]) -> None:
    rows = [row for row in probes_of(runs["engines"]) if row.probe == probes_of(runs["engines"])[0].probe]
    logprobs = [row.logprob for row in rows]
    assert len(set(logprobs)) == len(VALIDATED)
    assert len(logprobs) > 0
    assert np.isfinite(logprobs).all()


def test_probes_change_nothing_of_a_run(inputs: TinyRun, runs: dict[str, TinyRun], tmp_path: Path) -> None:
    run = copy_tiny_run(inputs, tmp_path)
    assert train_async_here(run, metrics__probes=0, trainer__steps=STEPS, **ON_POLICY) == 0
    assert not (run.run_folder / "probes.jsonl").exists()
    assert learnt(run) == learnt(runs["engines"])


def test_a_resumed_run_asks_about_the_same_tokens(inputs: TinyRun, runs: dict[str, TinyRun], tmp_path: Path) -> None:
    run = copy_tiny_run(inputs, tmp_path)
    settings = {"metrics__probes": COUNT, **NAMED, **ON_POLICY}
    assert train_async_here(run, trainer__steps=2, **settings) == 0
    assert train_async_here(run, "--resume", trainer__steps=STEPS, **settings) == 0
    assert by_validation(run) == by_validation(runs["engines"])


@pytest.mark.parametrize("validate_on", ["engines", "learner"])
def test_an_engine_that_cannot_say_what_it_thinks_stops_no_run(
    inputs: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    validate_on: str,
) -> None:
    kind: type[Any] = ReplicatedEngine if validate_on == "engines" else TransformersEngine
    score = kind.score

    async def fail(engine: Any, sequences: Any, *, top_k: int = 0, **options: Any) -> Any:
        if top_k:
            raise ZeroDivisionError("an engine of one's own")
        return await score(engine, sequences, top_k=top_k, **options)

    monkeypatch.setattr(kind, "score", fail)
    run = copy_tiny_run(inputs, tmp_path)
    assert train_async_here(run, trainer__steps=STEPS, schedule__validate_on=validate_on) == 0
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "probes_failed" in line)
    assert "ZeroDivisionError: an engine of one's own" in warning
    assert not (run.run_folder / "probes.jsonl").exists()
    rows = read_json_lines(run.run_folder / "metrics.jsonl")
    assert {row["step"] for row in rows if "timing_s/testing" in row} == set(VALIDATED)


@pytest.mark.parametrize("validate_on", ["engines", "learner"])
def test_a_role_that_dies_when_it_is_asked_is_asked_again_at_the_next_validation(
    inputs: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_on: str
) -> None:
    from rl_async_trainer import training_run

    roles = {"rollouter": "probed_roles:MortalRollouter", "learner": "probed_roles:MortalLearnerHost"}
    made = partial(training_run.AsyncTrainingRun, factories=roles)
    monkeypatch.setattr(training_run, "AsyncTrainingRun", made)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    run = copy_tiny_run(inputs, tmp_path)
    settings = {"roles__placement": "process", "roles__controller_restarts": 0}
    asked = {"metrics__probes": COUNT, "schedule__validate_on": validate_on, "trainer__steps": STEPS}
    assert train_async_here(run, **settings, **asked) == 0
    assert (run.run_folder / DIED).exists()
    died = [event["role"] for event in read_events(run.run_folder / "events.jsonl") if event["event"] == "role_died"]
    assert died == ["rollouter" if validate_on == "engines" else "learner"]
    steps = [step for step, _, _ in by_validation(run)]
    assert steps[-2:] == VALIDATED[-2:]
    assert {len(tokens) for _, _, tokens in by_validation(run)} == {COUNT}
