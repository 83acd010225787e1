"""Both trainers with agents: sessions of several trajectories or policy versions, replay and kills."""

import contextlib
import signal
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from agent_run import GROUP_SIZE, PROMPTS_PER_STEP, make_agent_run, questions
from async_runs import async_training, run_history, run_states, train_async_here
from run_equality import differing_metrics, learnt
from tiny_run import TinyRun, copy_tiny_run, train_here

from rl_metrics.run_files.rollout_log import RolloutRow, read_rollouts
from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout.skip import EntryKey, EntryStore

SMALL = {"metrics__log_rollouts": 100}


def rows_of(run: TinyRun) -> list[RolloutRow]:
    return list(read_rollouts(run.run_folder / "rollouts.jsonl"))


def metrics_of(run: TinyRun) -> list[dict[str, float]]:
    return [row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step]


def sessions_of(rows: list[RolloutRow]) -> dict[str, list[list[RolloutRow]]]:
    """Return the trajectories of each session, by prompt."""
    groups: dict[str, dict[int, list[RolloutRow]]] = {}
    for row in rows:
        groups.setdefault(row.prompt_uid, {}).setdefault(row.session, []).append(row)
    return {uid: list(sessions.values()) for uid, sessions in groups.items()}


def test_sessions_of_several_trajectories_train_as_one_and_are_replayed_without_agents(tmp_path, capsys):
    run = make_agent_run(tmp_path / "one")
    cache = {"rollout_cache__enabled": True, "rollout_cache__directory": tmp_path / "cache"}
    assert train_here(run, "--dry-run", **SMALL) == 0
    plan = capsys.readouterr().out
    for said in ("agent: agent.py:agent", "the chat template joins its turns, and keeps reasoning", "at most 128 a"):
        assert said in plan
    assert train_here(run, trainer__steps=2, **SMALL, **cache) == 0
    num_sessions = 2 * PROMPTS_PER_STEP * GROUP_SIZE
    assert len(questions(run)) == num_sessions
    groups = sessions_of(rows_of(run))
    sizes = {len(session) for sessions in groups.values() for session in sessions}
    assert sizes == {1, 2}
    for sessions in groups.values():
        assert len(sessions) == GROUP_SIZE
        assert len({row.problem for session in sessions for row in session}) == 1
        advantages = []
        for session in sessions:
            values = {value for row in session for value in row.columns["advantages"] if not np.isnan(value) and value}
            assert len(values) <= 1
            advantages.append(values.pop() if values else 0.0)
            trained = [sum(row.mask) for row in session]
            assert [turn[3] for row in session for turn in row.turns] == [0, 0, 0, 1][: 2 * len(session)]
            assert trained[1:] == [session[-1].turns[-1][2] - session[-1].turns[-1][1]] * (len(session) - 1)
        assert sum(advantages) == pytest.approx(0, abs=1e-4)  # for any number of trajectories per session
    for step in metrics_of(run):
        assert step["rollout/rescored_sessions"] == PROMPTS_PER_STEP * GROUP_SIZE
        assert step["rollout/rescored_diff_max"] < 1e-4
        assert step["gateway/turns/mean"] == 2 + step["gateway/forks"]
    again = copy_tiny_run(run, tmp_path / "again")
    settings = run.settings_file.read_text()
    again.settings_file.write_text(settings.replace(f"{run.folder}/runs", f"{again.folder}/runs"))
    assert train_here(again, trainer__steps=2, **SMALL, **cache) == 0
    assert len(questions(run)) == num_sessions
    assert [line for line in differing_metrics(again, run) if "rollout/replayed" not in line] == []
    assert learnt(again, step=2) == learnt(run, step=2)
    stored = EntryStore(str(tmp_path / "cache")).read(EntryKey(step=1))
    assert {row.parent for group in stored.groups for row in group.trajectories} == {None, 0}


def test_sessions_go_on_under_new_weights(tmp_path):
    run = make_agent_run(tmp_path)
    settings = {"vllm__max_num_seqs": 2, "trainer__steps": 4, "schedule__max_staleness": 1, **SMALL}
    assert train_async_here(run, **settings) == 0
    rows = rows_of(run)
    versions = [{int(v) for v in row.columns["versions"] if v >= 0} for row in rows]
    assert any(len(found) > 1 for found in versions), "no session saw two versions"
    assert all(0 <= row.step - 1 - min(found) <= 1 for row, found in zip(rows, versions, strict=True))
    metrics = metrics_of(run)
    assert sum(step["fully_async/partial/total_partial_num"] for step in metrics) > 0
    assert sum(step["rollout/rescored_skipped"] for step in metrics) > 0, "what two versions sampled cannot be scored"
    assert sum(step["rollout/audit_failures"] + step["rollout/failed_sessions"] for step in metrics) == 0


def agents_of(run: TinyRun) -> list[Path]:
    """Return the `/proc` files of a run's agent processes."""
    mark, found = str(run.folder / "agent.py").encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                found.append(path)
    return found


@pytest.mark.soak
def test_everything_killed_while_agents_run_trains_each_prompt_once_and_leaves_no_agent(tmp_path):
    run = make_agent_run(tmp_path / "run", kind="command")
    settings = {"trainer__steps": 8, "trainer__checkpoint_every": 2, **SMALL}
    for more in (2, 9, 14):
        words = ["--resume"] if (run.run_folder / "settings.toml").exists() else []
        wanted = len(questions(run)) + more
        with async_training(run, *words, **settings) as process:
            process.wait_until(lambda wanted=wanted: len(questions(run)) >= wanted and agents_of(run), "agents")
            process.kill_all()
            end = monotonic() + 60
            while agents_of(run):
                assert monotonic() < end, "agents outlive the run"
                signal.sigtimedwait([], 0.05)
    with async_training(run, "--resume", **settings) as process:
        assert process.wait(600) == 0, process.text
    history = run_history(run.run_folder)
    trained = [uid for uids in history.steps.values() for uid in uids]
    assert len(trained) == len(set(trained)) == 8 * PROMPTS_PER_STEP
    assert {uid for uid, state in run_states(run.run_folder).items() if state == "done"} == set(trained)
    assert agents_of(run) == []
