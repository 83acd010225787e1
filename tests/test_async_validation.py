"""Validation of the asynchronous trainer: samples of every batch, at their step, in every tracker, whoever answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from async_runs import async_training, run_states, train_async_here
from tiny_run import TinyRun, copy_tiny_run, example_module, make_tiny_run, train_here
from tracker_files import table_cells, tensorboard_series, wandb_attempts, wandb_history

from rl_metrics.events import read_events
from rl_metrics.trackers.jsonl import GenerationTable, read_generations, read_metrics

NUM_PROBLEMS, BATCH, SHOWN = 45, 7, 20
STEPS, HELD_STEP = 5, 2
DEADLINE_S = 120.0
FAILING = """

scored = reward


def reward(sample):
    row = sample.prompt_uid.rpartition("-")[2]
    if row.isdigit() and int(row) % 5 == 2:
        raise ValueError("no verdict")
    return scored(sample)
"""
"""No verdict on some validation problems; the uids of training problems end otherwise."""

DYING = """

scored_alive = reward


def reward(sample):
    died = FOLDER / "died"
    if sample.prompt_uid.endswith("-30") and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return scored_alive(sample)
"""
"""Whoever asks for the reward of a problem of the fifth batch is killed, the first time."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_tiny_run(tmp_path_factory.mktemp("inputs"))
    problems = example_module("task").split_problems()["validation"][:NUM_PROBLEMS]
    example_module("prepare").write_prompts(run.folder / "validation.parquet", problems)
    with (run.folder / "reward.py").open("a") as file:
        file.write(FAILING)
    return run


@pytest.fixture(params=["engines", "learner"], scope="module")
def finished(
    inputs: TinyRun, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[TinyRun, str]:
    """A run whose second validation is answered when later steps have been trained; and what it said."""
    run = copy_tiny_run(inputs, tmp_path_factory.mktemp(request.param))
    output = run.folder / "output.txt"
    with pytest.MonkeyPatch.context() as patch, output.open("w") as stream:
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr("sys.stdout", stream)
        answer_late(patch, request.param)
        settings = {
            "schedule__validate_on": request.param,
            "schedule__validation_batch": BATCH,
            "trainer__steps": STEPS,
            "trainer__keep_checkpoints": 5,
            "metrics__trackers": '["tensorboard", "wandb"]',
            "metrics__log_val_generations": SHOWN,
        }
        assert train_async_here(run, **settings) == 0, output.read_text()
    return run, output.read_text()


def answer_late(patch: pytest.MonkeyPatch, validate_on: str) -> None:
    """Keep the validation of HELD_STEP waiting until a later step is trained."""
    from rl_async_trainer.learner_host import LearnerHost
    from rl_async_trainer.messages import StepOrder
    from rl_async_trainer.rollouter import Rollouter

    answering: type[Any] = Rollouter if validate_on == "engines" else LearnerHost
    train, validate = LearnerHost.train, answering.validate
    later = asyncio.Event()

    async def train_and_tell(host: LearnerHost, order: StepOrder) -> Any:
        report = await train(host, order)
        if order.step == STEPS - 1:
            later.set()
        return report

    async def wait_and_validate(role: Any, batch: Any) -> Any:
        if batch.step == HELD_STEP:
            await asyncio.wait_for(later.wait(), DEADLINE_S)
        return await validate(role, batch)

    patch.setattr(LearnerHost, "train", train_and_tell)
    patch.setattr(answering, "validate", wait_and_validate)


def tables_of(run: TinyRun, split: str = "validation") -> list[GenerationTable]:
    tables = read_generations(run.run_folder / "generations.jsonl", with_replaced=True)
    return sorted((one for one in tables if one.name == f"{split}/generations"), key=lambda table: table.step)


def test_the_samples_come_from_all_batches_once_a_validation(finished: tuple[TinyRun, str]):
    run, _ = finished
    tables = tables_of(run)
    assert [table.step for table in tables] == [0, HELD_STEP, 4, STEPS]
    for table in tables:
        rows = [int(sample.prompt_uid.rpartition("-")[2]) for sample in table.samples]
        assert len(set(rows)) == SHOWN
        assert {row // BATCH for row in rows} == set(range(7))
    assert [(table.step, len(table.samples)) for table in tables_of(run, "test")] == [(0, 4), (STEPS, 4)]


def test_all_trackers_show_the_same_samples_at_the_same_step(finished: tuple[TinyRun, str]):
    from tensorboard.plugin_util import markdown_to_safe_html

    run, said = finished
    tables = tables_of(run)
    expected = {table.step: [sample.prompt_uid for sample in table.samples] for table in tables}
    shown = tensorboard_series(run.run_folder / "tensorboard", "validation/generations")
    assert {step: [row[-1] for row in table_cells(markdown_to_safe_html(page))[1:]] for step, page in shown} == expected
    (attempt,) = wandb_attempts(run.run_folder)
    found = {}
    for row in wandb_history(attempt):
        if "validation/generations|path" in row:
            table = json.loads((attempt / "files" / row["validation/generations|path"]).read_text())
            found[row["training/global_step"]] = [cells[1] for cells in table["data"]]
    assert found == expected
    lines = said.splitlines()
    for step, uids in expected.items():
        start = lines.index(f"validation/generations at step {step}: {SHOWN} samples") + 1
        samples = [line.split()[0] for line in lines[start:] if "  score " in line][:SHOWN]
        assert samples == uids


def test_each_sample_says_who_made_it_with_which_version(finished: tuple[TinyRun, str]):
    run, _ = finished
    metrics = {row.step: row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl")}
    is_learner = tables_of(run)[0].samples[0].source == "learner"
    for table in tables_of(run):
        assert {sample.source for sample in table.samples} == {"learner" if is_learner else "rollouter"}
        versions = {version for sample in table.samples for version in sample.policy_version}
        least, most = (metrics[table.step][f"validation/policy_version/{name}"] for name in ("min", "max"))
        assert least <= min(versions) <= max(versions) <= most
        if is_learner or table.step in (0, STEPS):
            assert versions == {table.step}
        elif table.step == HELD_STEP:
            assert min(versions) > HELD_STEP, "by then the engines had newer weights"


@pytest.mark.parametrize("finished", ["learner"], indirect=True)
def test_the_learners_side_answers_with_the_weights_of_the_step(finished: tuple[TinyRun, str]):
    """Also where later steps were trained before it did."""
    run, _ = finished
    table = next(table for table in tables_of(run) if table.step == HELD_STEP)
    inputs = [sample.input for sample in table.samples]
    outputs = [sample.output for sample in table.samples]
    assert outputs == greedy(run, HELD_STEP, inputs)
    assert outputs != greedy(run, STEPS - 1, inputs), "the comparison must tell steps apart"


def greedy(run: TinyRun, step: int, inputs: list[str]) -> list[str]:
    """What transformers' own generation answers with a checkpoint's policy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.run_folder / "checkpoints" / f"step_{step}" / "policy"
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "policy")
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    outputs = []
    for text in inputs:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        outputs.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    return outputs


def test_what_comes_late_joins_its_step_and_no_line_is_lost(finished: tuple[TinyRun, str]):
    run, said = finished
    lines = [json.loads(line) for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    order = [(line["step"], line.get("late", False)) for line in lines]
    assert order.index((HELD_STEP, True)) > order.index((STEPS - 1, False))
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(STEPS + 1))
    validated = [0, HELD_STEP, 4, STEPS]
    assert [row.step for row in rows if "timing_s/testing" in row.metrics] == validated
    assert [row.step for row in rows if "critic/rewards/mean" in row.metrics] == list(range(1, STEPS + 1))
    (name,) = {
        name for row in rows for name in row.metrics if name.startswith("val-core/") and name.endswith("/reward/mean@1")
    }
    board = run.run_folder / "tensorboard"
    expected = [(row.step, pytest.approx(row.metrics[name], nan_ok=True)) for row in rows if name in row.metrics]
    assert sorted(tensorboard_series(board, name)) == expected
    assert [step for step, _ in tensorboard_series(board, "critic/rewards/mean")] == list(range(1, STEPS + 1))
    history = wandb_history(wandb_attempts(run.run_folder)[0])
    assert sorted(row["training/global_step"] for row in history if "timing_s/testing" in row) == validated
    assert f"validation of step {HELD_STEP}: " in said


def test_failed_sessions_are_shown_with_their_reason(finished: tuple[TinyRun, str]):
    run, said = finished
    for table in tables_of(run):
        failures = {int(sample.prompt_uid.rpartition("-")[2]): sample.failure for sample in table.samples}
        failed = {row for row, failure in failures.items() if failure}
        assert failed == {row for row in failures if row % 5 == 2}
        assert failed
        assert all("ValueError: no verdict" in failure for failure in failures.values() if failure)
    assert "ValueError: no verdict" in said


@pytest.mark.parametrize("validate_on", ["engines", "learner"])
def test_a_validation_whose_role_dies_amid_it_is_asked_again(inputs: TinyRun, tmp_path: Path, validate_on: str):
    run = copy_tiny_run(inputs, tmp_path)
    with (run.folder / "reward.py").open("a") as file:
        file.write(DYING)
    settings = {
        "schedule__validate_on": validate_on,
        "schedule__validation_batch": BATCH,
        "trainer__steps": 4,
        "trainer__validate_first": False,
        "prompts__test": "none",
    }
    with async_training(run, **settings) as process:
        assert process.wait() == 0, process.text
        assert process.leftovers() == []
    assert (run.folder / "died").exists()
    died = [event["role"] for event in read_events(run.run_folder / "events.jsonl") if event["event"] == "role_died"]
    assert died == ["rollouter" if validate_on == "engines" else "learner"]
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2, 3, 4], "none of the untrained policy, as asked for"
    assert [row.step for row in rows if "timing_s/testing" in row.metrics] == [2, 4]
    tables = read_generations(run.run_folder / "generations.jsonl")
    assert [(table.step, len(table.samples)) for table in tables] == [(2, SHOWN), (4, SHOWN)]
    if validate_on == "learner":
        found = {version for sample in tables[0].samples for version in sample.policy_version}
        assert found == {2}, "also after the restart it has the weights of the step"
    assert set(run_states(run.run_folder).values()) == {"done"}


def test_the_synchronous_trainers_metrics_reach_every_tracker_too(
    inputs: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = copy_tiny_run(inputs, tmp_path)
    settings = {"metrics__trackers": '["tensorboard", "wandb"]', "prompts__validation_limit": 4}
    assert train_here(run, trainer__steps=2, **settings) == 0
    rows = [row for row in read_metrics(run.run_folder / "metrics.jsonl") if "critic/rewards/mean" in row.metrics]
    expected = [(row.step, pytest.approx(row.metrics["critic/rewards/mean"])) for row in rows]
    assert [step for step, _ in expected] == [1, 2]
    assert tensorboard_series(run.run_folder / "tensorboard", "critic/rewards/mean") == expected
    history = wandb_history(wandb_attempts(run.run_folder)[0])
    logged = [row for row in history if "critic/rewards/mean" in row]
    assert [(row["training/global_step"], row["critic/rewards/mean"]) for row in logged] == expected
