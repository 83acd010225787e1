"""Distillation end to end: two teachers over the queue, sessions of two trajectories, and teachers that are killed."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from distillation_runs import (
    KILLING_REWARD,
    SOURCES,
    as_toml,
    expected_logprobs,
    make_distillation_run,
    teacher_tables,
)
from tiny_run import GROUP_SIZE, PROMPTS_PER_STEP, REWARDS_BEFORE_STEP_1
from train_process import ENVIRONMENT, marked_processes

from rl_metrics.events import read_events
from rl_metrics.trackers.jsonl import read_metrics

pytest.importorskip("vllm")

STEPS, TOP_K = 3, 4
TRAJECTORIES = 2 * PROMPTS_PER_STEP * GROUP_SIZE
DRIVER = Path(__file__).parent / "support" / "distillation_driver.py"


def test_two_killed_teachers_are_started_anew_and_every_trajectory_trains_with_its_own(tmp_path: Path) -> None:
    run = make_distillation_run(tmp_path)
    in_step_2 = REWARDS_BEFORE_STEP_1 + TRAJECTORIES + 1
    logs = run.run_folder / "logs" / "teachers"
    (tmp_path / "reward.py").write_text(KILLING_REWARD.format(kill_at=in_step_2, logs=logs))
    words = run.train_words(
        rollout__engine="vllm",
        rollout__loop="two_outputs",
        trainer__steps=STEPS,
        trainer__validate_every=0,
        trainer__checkpoint_every=0,
        distillation__top_k=TOP_K,
        distillation__teachers=as_toml(teacher_tables(tmp_path, even="vllm", odd="megatron")),
    )
    mark = f"TINY_RUN_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path), *words],
        env={**os.environ, **ENVIRONMENT, name: value},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert marked_processes(mark) == []
    events = read_events(run.run_folder / "events.jsonl")
    released = [event for event in events if event["event"] == "teacher_lease_released"]
    assert len(released) >= 2, "both teachers died under a lease"
    assert all("SIGKILL" in str(event["error"]) or "signal 9" in str(event["error"]) for event in released)
    assert_each_trajectory_had_its_teacher(tmp_path)
    rows = read_metrics(run.run_folder / "metrics.jsonl")[1:]
    assert [sum(row.metrics[f"teacher/{source}/restarts"] for row in rows) for source in SOURCES] == [1, 1]
    for row in rows:
        assert (
            sum(row.metrics[f"teacher/{source}/trajectories"] for source in SOURCES)
            == 2 * PROMPTS_PER_STEP * GROUP_SIZE
        )
        assert row.metrics["actor/distillation/loss"] > 0.01
        assert row.metrics["timing_s/teacher"] >= 0
    assert "advantages" not in str(rows[0].metrics), "nothing is learnt from rewards"


def assert_each_trajectory_had_its_teacher(folder: Path) -> None:
    """Teachers' columns of every batch that trained are what transformers says of that teacher's model."""
    batches = [np.load(folder / f"trained-{step}.npz") for step in range(STEPS)]
    assert not (folder / f"trained-{STEPS}.npz").exists()
    for batch in batches:
        keys = [tuple(key) for key in batch["keys"]]
        assert len(keys) == TRAJECTORIES
        assert {(session, output) for _, session, output in keys} == {
            (str(session), output) for session in range(GROUP_SIZE) for output in "01"
        }
        offsets = batch["offsets"]
        for (uid, _, _), start, stop in zip(keys, offsets[:-1], offsets[1:], strict=True):
            teacher = int(uid.split("-")[1]) % 2
            ids, mask = batch["input_ids"][start:stop], batch["loss_mask"][start:stop]
            assert mask.any()
            np.testing.assert_array_equal(batch["teacher_index"][start:stop], np.where(mask, teacher, -1))
            expected = expected_logprobs(folder / f"teacher-{SOURCES[teacher]}", ids)
            given, given_ids = batch["teacher_logprobs"][start:stop], batch["teacher_ids"][start:stop]
            assert given.shape == (len(ids), TOP_K + 1)
            np.testing.assert_array_equal(given_ids[mask, 0], ids[mask])
            np.testing.assert_allclose(
                given[mask], np.take_along_axis(expected[mask], given_ids[mask].astype(np.int64), axis=1), atol=1e-4
            )
            np.testing.assert_allclose(given[mask, 1:], -np.sort(-expected[mask], axis=1)[:, :TOP_K], atol=1e-4)
            assert not given[~mask].any()
            assert (given_ids[~mask] == -1).all()
