"""Distillation end to end: two teachers over the queue, sessions with two trajectories, and killed teachers."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from distillation_runs import (
    SOURCES,
    as_toml,
    expected_logprobs,
    make_distillation_run,
    renumber,
    teacher_tables,
)
from tiny_run import GROUP_SIZE, PROMPTS_PER_STEP, REWARDS_BEFORE_STEP_1, train_here
from train_process import TrainProcess, training, wait_until_held

from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics

pytest.importorskip("vllm")

STEPS, TOP_K = 3, 4
TRAJECTORIES = 2 * PROMPTS_PER_STEP * GROUP_SIZE
SUPPORT = Path(__file__).parent / "support"


def test_two_killed_teachers_are_started_anew_and_every_trajectory_trains_with_its_own(tmp_path: Path) -> None:
    run = make_distillation_run(tmp_path)
    words = run.train_words(
        rollout__engine="vllm",
        rollout__loop="two_outputs",
        trainer__steps=STEPS,
        trainer__validate_every=0,
        trainer__checkpoint_every=0,
        distillation__top_k=TOP_K,
        distillation__teachers=as_toml(teacher_tables(tmp_path, even="vllm", odd="megatron")),
    )
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = TrainProcess(
        [str(tmp_path), *words],
        output=tmp_path / "output.txt",
        environment={"PYTHONPATH": path},
        module="distillation_driver",
    )
    try:
        assert process.wait(deadline_s=600.0) == 0, process.text
        assert process.leftovers() == []
    finally:
        process.end()
    events = read_events(run.run_folder / "events.jsonl")
    released = [event for event in events if event["event"] == "teacher_lease_released"]
    assert len(released) >= len(SOURCES), "both teachers died under a lease"
    assert all("SIGKILL" in str(event["error"]) or "signal 9" in str(event["error"]) for event in released)
    assert_each_trajectory_had_its_teacher(tmp_path)
    rows = read_metrics(run.run_folder / "metrics.jsonl")[1:]
    assert [sum(row.metrics[f"teacher/{source}/restarts"] for row in rows) for source in SOURCES] == [1, 1]
    for row in rows:
        assert sum(row.metrics[f"teacher/{source}/trajectories"] for source in SOURCES) == TRAJECTORIES
        assert row.metrics["actor/distillation/loss"] > 0.01
        assert row.metrics["timing_s/teacher"] >= 0
    assert "advantages" not in str(rows[0].metrics), "nothing is learnt from rewards"


def assert_each_trajectory_had_its_teacher(folder: Path) -> None:
    """Check the teacher columns of every trained batch against transformers' logprobs for each row's teacher."""
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


def test_texts_of_a_teacher_are_learnt_in_place_of_rollouts(tmp_path: Path) -> None:
    run = make_distillation_run(tmp_path)
    add_texts(tmp_path / "train.parquet", column="answer")
    settings = {
        "trainer__steps": 6,
        "trainer__validate_every": 0,
        "trainer__checkpoint_every": 0,
        "optimizer__learning_rate": 1e-2,
        "distillation__texts": "answer",
        "distillation__loss": "nll",
    }
    assert train_here(run, **settings) == 0
    rows = read_metrics(run.run_folder / "metrics.jsonl")[1:]
    losses = [row.metrics["actor/distillation/loss"] for row in rows]
    assert losses[-1] < losses[0] - 0.5, losses
    assert all(row.metrics["rollout/num_trajectories"] == 2 * PROMPTS_PER_STEP for row in rows)
    assert all("rollout/unscored_trajectories" not in row.metrics for row in rows)  # nothing scores texts
    assert "training/staleness/mean" not in rows[0].metrics
    assert "teacher/even/score_s" not in rows[0].metrics


MODES = {
    "whole distributions": {"distillation__distribution": "full"},
    "a reward beside rewards": {
        "distillation__loss": "k1",
        "distillation__used_as": "reward",
        "distillation__use_task_rewards": True,
    },
    "an adapter's loss beside rewards": {
        "distillation__loss": "reverse_kl",
        "distillation__use_task_rewards": True,
        "lora__rank": 4,
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mixture_on_two_ranks_teaches_once_and_then_from_the_cache(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_distillation_run(tmp_path)
    table = teacher_tables(tmp_path, even="megatron")["even"] | {"data_sources": [], "tensor": 2}
    settings = {
        "trainer__steps": 1,
        "trainer__validate_every": 0,
        "trainer__checkpoint_every": 0,
        "trainer__validate_first": False,
        "run__if_exists": "archive",
        "distillation__teachers": as_toml({"only": table}),
        "distillation__default_teacher": "only",
        "distillation__cache": tmp_path / "scores",
        "distillation__top_k": TOP_K,
        **MODES[mode],
    }
    assert train_here(run, "--dry-run", **settings) == 0
    assert re.search(
        r"teacher +only: 1 x 0\.\d\d MiB weights, for .* parameters, .* of them active\n", capsys.readouterr().out
    )
    found = []
    for _ in range(2):
        assert train_here(run, **settings) == 0
        found.append(read_metrics(run.run_folder / "metrics.jsonl")[-1].metrics)
    first, second = found
    hits = [(metrics["teacher/only/trajectories"], metrics["teacher/only/cache_hits"]) for metrics in found]
    assert hits == [(TRAJECTORIES / 2, 0), (0, TRAJECTORIES / 2)]
    assert "teachers" not in {path.name for path in (run.run_folder / "logs").glob("*")}, "nobody was asked again"
    learnt = [name for name in first if name.startswith(("actor/", "critic/"))]
    assert {name: second[name] for name in learnt} == {name: first[name] for name in learnt}
    assert abs(first["actor/distillation/loss"]) > 0.01
    assert ("critic/advantages/mean" in first) == ("rewards" in mode)


def add_texts(file: Path, *, column: str) -> None:
    """Add a column with two texts for each problem."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    pq.write_table(table.append_column(column, pa.array([["2", "44"]] * len(table))), file)


def test_ctrl_c_leaves_no_teacher_behind_and_the_run_goes_on(tmp_path: Path) -> None:
    run = make_distillation_run(tmp_path)
    settings = {
        "trainer__steps": 2,
        "trainer__validate_every": 0,
        "trainer__checkpoint_every": 0,
        "distillation__top_k": TOP_K,
        "distillation__teachers": as_toml(teacher_tables(tmp_path, even="megatron", odd="megatron")),
    }
    hold_after = REWARDS_BEFORE_STEP_1 + TRAJECTORIES // 2 + GROUP_SIZE + 1  # in step 2, after its first group
    with training(run, hold_after=hold_after, reward__timeout_s=None, **settings) as process:
        wait_until_held(process, run)
        assert len(process.children()) >= len(SOURCES)
        process.signal_group(signal.SIGINT)
        assert process.wait() == 130, process.text
        assert process.leftovers() == []
        assert "stopped after step 1; continue with --resume" in process.text
        assert "Traceback" not in process.text
    assert train_here(run, "--resume", **settings) == 0
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert sum(row.metrics[f"teacher/{source}/trajectories"] for source in SOURCES) == TRAJECTORIES / 2


def test_a_teacher_that_counts_its_tokens_otherwise_says_the_same(tmp_path: Path) -> None:
    run = make_distillation_run(tmp_path, all_text=True)
    renumber(tmp_path / "teacher-even", tmp_path / "renumbered")
    losses = {}
    for name, folder in {"same": "teacher-even", "other": "renumbered"}.items():
        table = teacher_tables(tmp_path, even="megatron")["even"] | {
            "model": str(tmp_path / folder),
            "data_sources": [],
        }
        settings = {
            "run__name": name,
            "trainer__steps": 1,
            "trainer__validate_every": 0,
            "trainer__checkpoint_every": 0,
            "trainer__validate_first": False,
            "distillation__teachers": as_toml({"only": table}),
            "distillation__default_teacher": "only",
            "distillation__top_k": TOP_K,
        }
        if name == "other":
            assert train_here(run, **settings) == 2, "it is refused, unless it is aligned"
        assert train_here(run, **settings, distillation__other_tokenizer="align") == 0
        metrics = read_metrics(tmp_path / "runs" / name / "metrics.jsonl")[-1].metrics
        losses[name] = {key: metrics[f"actor/distillation/{key}"] for key in ("loss", "aligned_fraction", "tail_mass")}
    assert losses["same"]["loss"] > 0.01
    assert losses["other"] == pytest.approx(losses["same"], rel=1e-5)
