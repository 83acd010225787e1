"""`kill -9` in asynchronous runs with real engines and Megatron: prompts train once; on policy, results are equal."""

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from async_faults import num_record_lines
from async_runs import async_training, role_pid, run_history, run_states, train_async_here
from documented_listeners import undocumented
from run_equality import differing_metrics, learnt, summary
from tiny_run import PROMPTS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run
from train_process import TrainProcess

from rl_async_trainer.record import FILE as RECORD
from rl_metrics.run_files.events import read_events

pytestmark = pytest.mark.slow

STEPS = 4
LONG_STEPS, NUM_KILLS = 60, 20
ON_POLICY: dict[str, Any] = {
    "schedule__max_staleness": 0,
    "trainer__checkpoint_every": 1,
    "trainer__steps": STEPS,
    "policy__backend": "megatron",
}
IN_PROCESSES = {
    **ON_POLICY,
    "rollout__placement": "process",
    "roles__hang_deadline_s": 600.0,
    "roles__controller_restarts": 0,  # the started process is the controller, which tests stop between two batches
}
LOGS = {"rollouter": "rollouter-0", "learner": "learner-host-0", "engine": "transformers-engine-0", "rank": "learner-1"}
ROLES = ("engine", "learner", "rollouter")
BY_ATTEMPT = ("fully_async/", "weights/", "rollout/", "timing_s/", "training/")
"""Metrics that count an attempt's work, or exist only where weights were published or saved again."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Return a finished on-policy run without kills."""
    run = make_tiny_run(tmp_path_factory.mktemp("undisturbed"))
    assert train_async_here(run, **ON_POLICY) == 0
    return run


@pytest.fixture
def run(undisturbed: TinyRun, tmp_path: Path) -> TinyRun:
    """Return the inputs of the same run in a new folder."""
    return copy_tiny_run(undisturbed, tmp_path / "run")


def assert_same_outcome(run: TinyRun, expected: TinyRun) -> None:
    """Check that checkpoints and results are equal bit for bit, and that each step trained the same prompts once."""
    assert learnt(run, step=STEPS) == learnt(expected, step=STEPS)
    assert [one for one in differing_metrics(run, expected) if not one.partition(": ")[2].startswith(BY_ATTEMPT)] == []
    assert summary(run) == summary(expected)
    assert run_history(run.run_folder).steps == run_history(expected.run_folder).steps
    assert run_states(run.run_folder) == run_states(expected.run_folder)
    assert list(run_states(run.run_folder).values()) == ["done"] * STEPS * PROMPTS_PER_STEP


def wait_for_lines(process: TrainProcess, run: TinyRun, count: int) -> None:
    process.wait_until(lambda: num_record_lines(run) >= count, f"{count} lines of the record")


def stop_between_batches(process: TrainProcess, run: TinyRun, count: int) -> None:
    """Stop the supervisor once the record has `count` lines and no batch is partly settled.

    Groups that are regenerated without the rest of their batch have logprobs that differ in their last bits.
    """

    def has_stopped() -> bool:
        if num_record_lines(run) < count:
            return False
        process.signal(signal.SIGSTOP)
        started, settled = set[str](), set[str]()
        for line in map(json.loads, (run.run_folder / RECORD).read_bytes().split(b"\n")[:-1]):
            if line["what"] == "started":
                started, settled = set(line["uids"]), set()
            elif line["what"] == "settled":
                settled.add(line["uid"])
        if not settled or started <= settled:
            return True
        process.signal(signal.SIGCONT)
        return False

    process.wait_until(has_stopped, f"{count} lines of the record, between two batches")


def kill_roles(
    process: TrainProcess, run: TinyRun, roles: Sequence[str], draw: random.Random, *, is_between_batches: bool = False
) -> None:
    """Kill the roles one after another, each after 2 to 9 more record lines and once it has a process."""
    for role in roles:
        count = num_record_lines(run) + draw.randint(2, 9)
        wait_for_lines(process, run, count)
        log = LOGS[role]
        process.wait_until(lambda log=log: role_pid(run, log) in process.children(), f"a process of the {role}")
        if is_between_batches:
            stop_between_batches(process, run, count)
        os.kill(role_pid(run, log), signal.SIGKILL)
        process.signal(signal.SIGCONT)


def test_async_rollouter_learner_and_engine_killed_on_policy(undisturbed: TinyRun, run: TinyRun, seed: int) -> None:
    draw = random.Random(seed)
    roles = draw.sample(ROLES, len(ROLES))
    with async_training(run, **IN_PROCESSES) as process:
        kill_roles(process, run, roles, draw, is_between_batches=True)
        assert process.wait() == 0, f"seed {seed}, {roles}:\n{process.text}"
        assert process.leftovers() == []
    died = [event["role"] for event in read_events(run.run_folder / "events.jsonl") if event["event"] == "role_died"]
    assert sorted(died) == ["learner", "rollouter"]
    assert_same_outcome(run, undisturbed)


def test_async_everything_killed_on_policy_and_resumed(undisturbed: TinyRun, run: TinyRun, seed: int) -> None:
    draw = random.Random(seed)
    for attempt in range(2):
        words = ["--resume"] if attempt else []
        with async_training(run, *words, **IN_PROCESSES) as process:
            stop_between_batches(process, run, num_record_lines(run) + draw.randint(3, 15))
            process.kill_all()
            assert process.leftovers() == []
    with async_training(run, "--resume", **IN_PROCESSES) as process:
        assert process.wait() == 0, f"seed {seed}:\n{process.text}"
        assert process.leftovers() == []
    assert_same_outcome(run, undisturbed)


def test_async_roles_killed_amid_partial_rollouts(run: TinyRun, seed: int) -> None:
    """Off policy the outcome depends on timing, but each prompt still trains once. Engines receive an adapter."""
    draw = random.Random(seed)
    settings = {**IN_PROCESSES, "schedule__max_staleness": 2, "trainer__steps": 8, "trainer__checkpoint_every": 3}
    settings |= {"lora__rank": 4, "optimizer__learning_rate": 3e-2}
    with async_training(run, **settings) as process:
        kill_roles(process, run, ["learner", "rollouter", "engine", "learner"], draw)
        assert process.wait() == 0, f"seed {seed}:\n{process.text}"
        assert process.leftovers() == []
    assert_each_trained_once(run, steps=8)


def test_async_a_killed_rank_starts_the_learner_again(undisturbed: TinyRun, run: TinyRun, seed: int) -> None:
    """The surviving rank's state is useless alone, so both ranks restart from the learner's checkpoint.

    Each rank sends its own weights, also to a restarted engine.
    """
    draw = random.Random(seed)
    ranks = {"parallel__ranks": 2, "cluster__placement": "process", "weights__transport": "direct"}
    with async_training(run, **IN_PROCESSES, **ranks) as process:
        wait_for_lines(process, run, 1)
        assert undocumented([process.pid, *process.children()]) == []
        kill_roles(process, run, ["engine", "rank"], draw)
        assert process.wait() == 0, f"seed {seed}:\n{process.text}"
        assert process.leftovers() == []
    (death,) = [event for event in read_events(run.run_folder / "events.jsonl") if event["event"] == "role_died"]
    assert death["role"] == "learner"
    assert "learner[1]" in str(death["error"])
    assert run_history(run.run_folder).steps == run_history(undisturbed.run_folder).steps
    assert list(run_states(run.run_folder).values()) == ["done"] * STEPS * PROMPTS_PER_STEP


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapter"])
def test_async_twenty_kills_of_real_roles(run: TinyRun, seed: int, rank: int) -> None:
    draw = random.Random(seed)
    settings = {
        **IN_PROCESSES,
        "schedule__max_staleness": 2,
        "trainer__steps": LONG_STEPS,
        "lora__rank": rank,
        "trainer__checkpoint_every": 3,
        "roles__rollouter_restarts": NUM_KILLS,
        "roles__learner_restarts": NUM_KILLS,
        "replicas__restarts": NUM_KILLS,
        "parallel__ranks": 2,
        "cluster__placement": "process",
        "weights__transport": "direct",
    }
    roles = draw.choices(sorted(LOGS), k=NUM_KILLS)
    with async_training(run, **settings) as process:
        kill_roles(process, run, roles, draw)
        assert process.wait(600.0) == 0, f"seed {seed}, {roles}:\n{process.text}"
        assert process.leftovers() == []
    assert_each_trained_once(run, steps=LONG_STEPS)


def assert_each_trained_once(run: TinyRun, *, steps: int) -> None:
    """Check that each prompt was acked and trained in exactly one step."""
    history = run_history(run.run_folder).steps
    trained = [uid for _, uids in sorted(history.items()) for uid in uids]
    assert len(trained) == len(set(trained)) == steps * PROMPTS_PER_STEP
    assert run_states(run.run_folder) == dict.fromkeys(run_states(run.run_folder), "done")
    assert set(run_states(run.run_folder)) == set(trained)
