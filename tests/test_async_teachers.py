"""Teachers of an asynchronous run: every trajectory is scored, even if their host dies."""

import os
import signal
from pathlib import Path

import pytest
from async_runs import async_training, role_pid, run_history, run_states
from distillation_runs import as_toml, make_distillation_run, teacher_tables
from tiny_run import GROUP_SIZE, PROMPTS_PER_STEP

from rl_async_trainer.liveness.control_socket import ask_run
from rl_metrics.hang import read_hang_report
from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics

STEPS, TOP_K = 4, 4
PER_STEP = PROMPTS_PER_STEP * GROUP_SIZE
STATUS_S = 60.0


@pytest.mark.slow
def test_a_host_that_dies_while_it_scores_and_a_teacher_that_hangs(tmp_path: Path):
    run = make_distillation_run(tmp_path)
    table = teacher_tables(tmp_path, even="megatron")["even"] | {"data_sources": []}
    settings = {
        "policy__backend": "megatron",
        "roles__hang_deadline_s": 20.0,
        "roles__on_hang": "report",
        "trainer__steps": STEPS,
        "trainer__validate_every": 0,
        "trainer__validate_first": False,
        "distillation__teachers": as_toml({"only": table}),
        "distillation__default_teacher": "only",
        "distillation__top_k": TOP_K,
    }
    with async_training(run, **settings) as process:

        def num_trained() -> int:
            return len(run_history(run.run_folder).steps) if (run.run_folder / "record.jsonl").exists() else 0

        def scored_by_teachers() -> bool:
            roles = ask_run(run.run_folder, {"do": "status"}, deadline_s=STATUS_S)["roles"]
            return roles["teachers"].startswith("scores ")

        process.wait_until(lambda: num_trained() >= 1, "a step")
        os.kill(engine_pid(run.run_folder), signal.SIGSTOP)
        process.wait_until(scored_by_teachers, "a lease of the stopped teacher")
        process.wait_until((run.run_folder / "hang.json").exists, "hang.json")
        os.kill(role_pid(run, "teachers-0"), signal.SIGKILL)
        assert process.wait(300) == 0, process.text
        assert process.leftovers() == []
    doing = {role.name: role.doing for role in read_hang_report(run.run_folder / "hang.json").roles}
    assert doing["teachers"].startswith("scores ")
    assert doing["teachers"].endswith(" s by teacher 'only'")
    events = read_events(run.run_folder / "events.jsonl")
    assert [event["role"] for event in events if event["event"] == "role_died"] == ["teachers"]
    states = run_states(run.run_folder)
    assert len(states) == STEPS * PROMPTS_PER_STEP
    assert set(states.values()) == {"done"}
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert [row.metrics["fully_async/restarts/teachers"] for row in rows] == sorted(
        row.metrics["fully_async/restarts/teachers"] for row in rows
    )
    assert rows[-1].metrics["fully_async/restarts/teachers"] == 1
    assert all(row.metrics["actor/distillation/loss"] > 0.01 for row in rows)
    assert all(row.metrics["rollout/num_trajectories"] == PER_STEP for row in rows)
    assert sum(row.metrics["teacher/only/trajectories"] for row in rows if "teacher/only/score_s" in row.metrics) > 0


def engine_pid(folder: Path) -> int:
    """Return the process ID of the teacher's only rank, from its log."""
    (log,) = (folder / "logs" / "teachers").rglob("*.log")
    (head,) = [line for line in log.read_text().splitlines() if line.startswith("===") and " pid " in line]
    return int(head.split(" pid ")[1].split()[0])
