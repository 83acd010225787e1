"""Health and doctor on recorded runs of examples: they report the actual fault first, and healthy runs pass.

`tests/recordings/record.py` recorded the runs and lists how each was misconfigured.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_metrics.doctor.diagnosing import diagnose
from rl_metrics.health import Verdict, judge
from rl_metrics.run_files.history import History
from rl_metrics.run_files.run_record import RunRecord, open_run

RECORDINGS = Path(__file__).parent / "recordings"
HEALTHY = ("healthy_0", "healthy_1", "healthy_2", "healthy_distillation")
SICK = {
    "learning_rate_too_high": ("reward_fell", "learning rate too high"),
    "reward_zero": ("reward_zero", "the reward function does not find answers, or compares them with the wrong field"),
    "stale_weights": ("weights_proof", "stale weights: an update did not reach an engine"),
    "kl_too_strong": ("policy_held", "the KL penalty is too strong"),
    "entropy_collapse": ("entropy_collapse", "an entropy bonus that is negative"),
    "truncated_responses": ("truncated", "the limit is too low for the task"),
    "slow_reward": ("reward_slow", "slow reward: sessions wait"),
    "memory_leak": ("memory", "a leak in the owner that grows: objects of every step are kept"),
}
DIAGNOSED = {
    "learning_rate_too_high": ("health", "learning_rate_too_high"),
    "reward_zero": ("health", "the_reward_function_does_not_find_answers"),
    "stale_weights": ("mismatch", "stale_weights"),
    "kl_too_strong": ("health", "the_kl_penalty_is_too_strong"),
    "entropy_collapse": ("health", "an_entropy_bonus_that_is_negative"),
    "truncated_responses": ("health", "the_limit_is_too_low_for_the_task"),
    "slow_reward": ("health", "slow_reward"),
    "memory_leak": ("memory", "trainer"),
}
VERDICT_EVERY = 10
"""Steps between verdicts while a run trains, like `health.every`."""


def recorded(name: str) -> RunRecord:
    return open_run(RECORDINGS / name)


def first_steps(history: History, last: int) -> History:
    """Return the history up to a step."""
    is_past = history.steps <= last
    values = {name: column[is_past] for name, column in history.values.items()}
    return History(steps=history.steps[is_past], times=history.times[is_past], values=values)


def verdicts(run: RunRecord) -> Iterator[Verdict]:
    """Yield the verdicts during training, and the final one."""
    history = run.history
    last = int(history.steps[-1])
    for step in [*range(VERDICT_EVERY, last, VERDICT_EVERY), last]:
        yield judge(first_steps(history, step), events=[event for event in run.events if event.get("step", 0) <= step])


def test_every_recording_is_judged() -> None:
    assert {path.name for path in RECORDINGS.iterdir() if (path / "metrics.jsonl").exists()} == {*HEALTHY, *SICK}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding_at_any_time(name: str) -> None:
    found = [(verdict.step, [finding.rule for finding in verdict.findings]) for verdict in verdicts(recorded(name))]
    assert [one for one in found if one[1]] == []


@pytest.mark.parametrize("name", HEALTHY)
def test_the_doctor_finds_nothing_in_a_healthy_run(name: str) -> None:
    report = diagnose(recorded(name))
    assert report.diagnoses == ()
    assert {result.state for result in report.no_findings} == {"right"}


@pytest.mark.parametrize(("name", "rule", "cause"), [(name, *expected) for name, expected in SICK.items()])
def test_health_names_each_sickness_as_the_first_cause(name: str, rule: str, cause: str) -> None:
    *_, verdict = verdicts(recorded(name))
    first = verdict.findings[0]
    assert first.rule == rule
    assert first.causes[0].startswith(cause)
    assert first.advice
    assert first.evidence


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, (rule, _) in SICK.items()])
def test_what_is_named_first_stays_so(name: str, rule: str) -> None:
    first = [verdict.findings[0].rule for verdict in verdicts(recorded(name)) if verdict.findings]
    assert first[first.index(rule) :] == [rule] * (len(first) - first.index(rule))


@pytest.mark.parametrize(("name", "kind", "cause"), [(name, *expected) for name, expected in DIAGNOSED.items()])
def test_the_doctor_names_the_cause_first(name: str, kind: str, cause: str) -> None:
    first = diagnose(recorded(name)).diagnoses[0]
    assert first.kind == kind
    assert first.causes[0].name.startswith(cause)


@pytest.mark.parametrize("name", SICK)
def test_every_cause_that_the_doctor_names_has_its_own_advice(name: str) -> None:
    causes = [cause for diagnosis in diagnose(recorded(name)).diagnoses for cause in diagnosis.causes]
    assert [cause.name for cause in causes if not cause.advice] == []


def test_what_does_not_follow_from_the_first_diagnosis_is_one_of_its_own() -> None:
    told = {name: [diagnosis.what for diagnosis in diagnose(recorded(name)).diagnoses] for name in SICK}
    assert told["truncated_responses"] == ["Many responses are cut at the length limit.", "The gradients stay large."]
    assert len(told["reward_zero"]) == len(told["learning_rate_too_high"]) == len(told["stale_weights"]) == 1
