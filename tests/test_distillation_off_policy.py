"""Distillation from stored texts, from stored scores, and by a teacher with another tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distillation_runs import as_toml, make_teacher
from entry_forgery import flip
from rounding import rounding_bound
from tiny_run import (
    PROMPTS_PER_STEP,
    TinyRun,
    copy_tiny_run,
    example_module,
    make_tiny_policy,
    make_tiny_run,
    train_here,
)

from rl_metrics.report.outcome import describe_outcome
from rl_metrics.run_files.run_record import open_run
from rl_metrics.trackers.jsonl import read_metrics

STEPS = 4
MARK = "actor/distillation/"
QUIET = {"trainer__validate_every": 0, "trainer__checkpoint_every": 0, "trainer__validate_first": False}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Return a tiny run with one or two texts per prompt in the column `solution`, and a teacher in its folder."""
    run = make_tiny_run(tmp_path_factory.mktemp("off-policy"))
    file = run.folder / "train.parquet"
    table = pq.read_table(file)
    texts = [["4268", "20"] if row % 2 else ["864"] for row in range(len(table))]
    pq.write_table(table.append_column("solution", pa.array(texts)), file)
    make_teacher(run.folder / "teacher", like=run.folder / "policy", seed=1)
    return run


@pytest.fixture
def run(prepared: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_tiny_run(prepared, tmp_path / "run")


def steps_of(run: TinyRun) -> list[dict[str, float]]:
    return [dict(row.metrics) for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step]


def teacher(run: TinyRun, **options: Any) -> str:
    table = {"model": str(run.folder / "teacher"), "engine": "megatron", "num_threads": 1, **options}
    return as_toml({"big": table})


def with_teacher(run: TinyRun, **options: Any) -> dict[str, Any]:
    return {
        "distillation__teachers": teacher(run),
        "distillation__top_k": 8,
        "trainer__steps": STEPS,
        **QUIET,
        **options,
    }


def test_texts_alone_are_imitated_without_a_teacher(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"distillation__texts": "solution", "distillation__loss": "nll", "optimizer__learning_rate": "1e-2"}
    assert train_here(run, trainer__steps=8, **QUIET, **options) == 0
    rows = steps_of(run)
    assert len(rows) == 8
    assert rows[0][MARK + "loss"] > 2, "a random policy knows nothing of the texts"
    assert rows[-1][MARK + "loss"] < 0.6 * rows[0][MARK + "loss"]
    assert not [name for name in rows[0] if name.startswith(("rollout_corr/", "teacher/", "training/staleness"))]
    assert not (run.run_folder / "logs" / "teachers").exists()
    assert "rollout/unscored_trajectories" not in rows[0], "nothing scores a text"
    findings = json.loads((run.run_folder / "health.json").read_text())["findings"]
    assert "lost_rollouts" not in [finding["rule"] for finding in findings]
    assert "\nImitation of texts 8/8  " in capsys.readouterr().out
    outcome = describe_outcome(open_run(run.run_folder))
    assert ("method", "supervised, imitates the texts of the column solution") in outcome["trained"]
    assert " and the cross entropy of the texts went from " in outcome["sentence"]


def test_a_run_from_stored_scores_learns_the_same_and_starts_no_teacher(run: TinyRun, tmp_path: Path) -> None:
    again = copy_tiny_run(run, tmp_path / "again")
    cache = {"distillation__texts": "solution", "distillation__cache": tmp_path / "scores"}
    assert train_here(run, **with_teacher(run, **cache)) == 0
    assert list((run.run_folder / "logs" / "teachers").iterdir())
    assert train_here(again, **with_teacher(again, **cache)) == 0
    assert not list((again.run_folder / "logs").glob("teachers/*"))

    first, second = steps_of(run), steps_of(again)
    assert [row[MARK + "loss"] for row in first] == [row[MARK + "loss"] for row in second]
    assert all(row[MARK + "loss"] > 0.01 for row in first)
    num_texts = sum(row["teacher/big/trajectories"] for row in first)
    assert STEPS * PROMPTS_PER_STEP < num_texts <= 2 * STEPS * PROMPTS_PER_STEP
    assert sum(row["teacher/big/cache_hits"] for row in first) == 0
    assert sum(row["teacher/big/cache_hits"] for row in second) == num_texts
    assert sum(row["teacher/big/trajectories"] for row in second) == 0


def test_rollouts_that_were_scored_before_need_no_teacher_and_torn_scores_do(
    run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"distillation__cache": tmp_path / "scores", "distillation__loss": "reverse_kl"}
    losses = []
    for name, is_torn in (("first", False), ("replayed", False), ("torn", True)):
        if is_torn:
            entry, *_ = sorted((tmp_path / "scores").glob("*/scores-*"))
            flip(entry, "logprobs/c/0")
        one = copy_tiny_run(run, tmp_path / name)
        assert train_here(one, **with_teacher(one, **options)) == 0
        has_started = bool(list((one.run_folder / "logs").glob("teachers/*")))
        assert has_started is (name != "replayed")
        losses.append([row[MARK + "loss"] for row in steps_of(one)])
    assert losses[0] == losses[1]
    # The teacher scores the torn group beside others; a token's terms are at most a few probabilities and logprobs.
    assert losses[2] == pytest.approx(losses[0], rel=0, abs=rounding_bound(4.0))
    assert "teacher_scores_set_aside" in capfd.readouterr().err
    assert len(list((tmp_path / "scores").glob("*/broken/scores-*"))) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distillation__texts": "answer"}, "'answer', which prompt"),
        ({"distillation__texts": "solution", "rollout__max_response_tokens": 4}, "the text '4268' has 5 tokens"),
        ({"distillation__loss": "nll"}, "set texts to their column, found none"),
    ],
)
def test_texts_that_are_not_there_are_refused_before_anything_starts(
    run: TinyRun, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    assert train_here(run, "--dry-run", **{"distillation__loss": "nll", **QUIET, **changes}) == 2
    assert words in capsys.readouterr().err


def write_permuted_teacher(folder: Path, *, like: Path) -> None:
    """Write the same model with permuted token ids: another vocabulary with the same distribution of texts."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(like, folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    order = np.random.default_rng(0).permutation(len(vocab))  # new id by old id
    document["model"]["vocab"] = {token: int(order[index]) for token, index in vocab.items()}
    for token in document["added_tokens"]:
        token["id"] = int(order[token["id"]])
    (folder / "tokenizer.json").write_text(json.dumps(document))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        for field in ("eos_token_id", "pad_token_id"):
            if content.get(field) is not None:
                content[field] = int(order[content[field]])
        (folder / name).write_text(json.dumps(content))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][np.argsort(order)]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("loss", ["forward_kl", "k3", "uld"])
def test_the_student_under_another_vocabulary_teaches_it_nothing_new(
    run: TinyRun, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = example_module("prepare").make_tokenizer()
    shutil.rmtree(run.folder / "policy")
    make_tiny_policy(run.folder / "policy", tokenizer, vocab_size=len(tokenizer))
    shutil.rmtree(run.folder / "teacher")
    write_permuted_teacher(run.folder / "teacher", like=run.folder / "policy")
    options = with_teacher(run, distillation__loss=loss, trainer__steps=1)
    assert train_here(run, "--dry-run", **options) == 2
    said = capsys.readouterr().err
    assert "distillation.teachers.big must have the student's vocabulary" in said
    assert "ids differ (id 0: student '<pad>', teacher " in said

    assert train_here(run, **options, distillation__other_tokenizer="align") == 0
    (row,) = steps_of(run)
    assert row[MARK + "aligned_fraction"] == 1
    assert abs(row[MARK + "loss"]) < 1e-5
