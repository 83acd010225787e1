"""Validation in the asynchronous trainer: samples of every batch, at their step, in every tracker."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from async_runs import async_training, run_states, train_async_here
from tiny_run import TinyRun, copy_tiny_run, example_module, make_tiny_run, train_here
from tracker_files import table_cells, tensorboard_series, wandb_attempts, wandb_history

from rl_metrics.run_files.events import read_events
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
"""Validation problems without a verdict; uids of training problems end differently."""

DYING = """

scored_alive = reward


def reward(sample):
    died = FOLDER / "died"
    if sample.prompt_uid.endswith("-30") and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return scored_alive(sample)
"""
"""The first process that requests the reward of a problem of the fifth batch is killed."""

VOTING = """

from rl_rollout import RewardResult

failing = reward


def reward(sample):
    solved = float(sample.response_text[:1] in "01234")
    extras = {"pred": sample.response_text[:1]}
    return RewardResult(reward=failing(sample), components={"acc": solved}, extras=extras)
"""
"""Half of the first characters are right; responses vote by them."""


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
    """Return a run whose second validation finishes after later steps have trained, and its output."""
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
    """Hold the validation of HELD_STEP until a later step is trained."""
    from rl_async_trainer.messages import StepOrder
    from rl_async_trainer.roles.learner import RunLearner
    from rl_async_trainer.roles.rollouter import RunRollouter

    answering: type[Any] = RunRollouter if validate_on == "engines" else RunLearner
    train, validate = RunLearner.train, answering.validate
    later = asyncio.Event()

    async def train_and_tell(host: RunLearner, order: StepOrder) -> Any:
        report = await train(host, order)
        if order.step == STEPS - 1:
            later.set()
        return report

    async def wait_and_validate(role: Any, batch: Any) -> Any:
        if batch.step == HELD_STEP:
            await asyncio.wait_for(later.wait(), DEADLINE_S)
        return await validate(role, batch)

    patch.setattr(RunLearner, "train", train_and_tell)
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
    titles = [line.partition(":")[0] for line in lines if line.startswith("validation at step")]
    assert titles == ["validation at step 0", f"validation at step {STEPS}"]
    for table in (tables[0], tables[-1]):
        title = f"validation at step {table.step}: {SHOWN} samples, "
        start = next(place for place, line in enumerate(lines) if line.startswith(title)) + 1
        worst = [sample for sample in table.samples if sample.failure][:3]
        assert worst
        for sample, line in zip(worst, lines[start : start + 3], strict=False):
            assert line.startswith(f"  failed: {sample.input} -> {sample.output}  expected {sample.ground_truth}  ")
            assert "ValueError: no verdict" in line
        assert not lines[start + 3].startswith(("  failed:", "  wrong:", "  score"))


def test_each_sample_says_who_made_it_with_which_version(finished: tuple[TinyRun, str]):
    run, _ = finished
    metrics = {row.step: row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl")}
    is_learner = tables_of(run)[0].samples[0].source == "learner"
    for table in tables_of(run):
        assert {sample.source for sample in table.samples} == {"learner" if is_learner else "rollouter"}
        versions = {version for sample in table.samples for version in sample.policy_version}
        least, most = (metrics[table.step][f"validation/policy_version/{name}"] for name in ("min", "max"))
        assert least <= min(versions) <= max(versions) <= most
        assert versions == {table.step}, "engines get no newer weights while they answer"
        assert metrics[table.step]["validation/is_exact"] == 1.0


@pytest.mark.parametrize("finished", ["learner"], indirect=True)
def test_the_learners_side_answers_with_the_weights_of_the_step(finished: tuple[TinyRun, str]):
    """It does so even after later steps have trained."""
    run, _ = finished
    table = next(table for table in tables_of(run) if table.step == HELD_STEP)
    inputs = [sample.input for sample in table.samples]
    outputs = [sample.output for sample in table.samples]
    assert outputs == greedy(run, HELD_STEP, inputs)
    assert outputs != greedy(run, STEPS - 1, inputs), "the comparison must tell steps apart"


def greedy(run: TinyRun, step: int, inputs: list[str]) -> list[str]:
    """Return the greedy responses that transformers generates with a checkpoint's policy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.run_folder / "checkpoints" / f"step_{step}" / "policy"
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "policy", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).float()
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
        assert [failures[row] for row in sorted(failed) if "ValueError: no verdict" not in failures[row]] == []
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
        "prompts__validation_samples": 2,
        "prompts__validation_temperature": 1.0,
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
    counted = [value for row in rows for name, value in row.metrics.items() if name.endswith("/num_responses")]
    assert counted == [2.0 * NUM_PROBLEMS, 2.0 * NUM_PROBLEMS], "none is lost, and none counts twice"
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


SEVERAL = {
    "prompts__validation_samples": 3,
    "prompts__validation_temperature": 1.0,
    "prompts__validation_limit": 12,
    "metrics__log_val_generations": 5,
    "trainer__steps": 2,
}


@pytest.fixture(scope="module")
def several(inputs: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    """Train runs with three responses per validation problem, by the side that answers validations."""
    runs = {}
    for name in ("trainer", "engines", "learner"):
        run = runs[name] = copy_tiny_run(inputs, tmp_path_factory.mktemp(name))
        with (run.folder / "reward.py").open("a") as file:
            file.write(VOTING)
        if name == "trainer":
            assert train_here(run, **SEVERAL) == 0
        else:
            at_once = {"schedule__max_staleness": 0, "schedule__sync_every": 1}
            batches = {"schedule__validate_on": name, "schedule__validation_batch": BATCH}
            assert train_async_here(run, **SEVERAL, **at_once, **batches) == 0
    return runs


def validation_metrics(run: TinyRun) -> dict[int, dict[str, float]]:
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    found = {row.step: {name: row.metrics[name] for name in row.metrics if name.startswith("val-")} for row in rows}
    return {step: metrics for step, metrics in found.items() if metrics}


def test_several_responses_to_a_problem_are_best_worst_and_voted_on(several: dict[str, TinyRun]):
    metrics = validation_metrics(several["engines"])
    assert list(metrics) == [0, 2]
    core, rest = "val-core/arithmetic/acc", "val-aux/arithmetic/acc"
    for row in metrics.values():
        assert row["val-aux/arithmetic/num_prompts"] == 12
        assert row["val-aux/arithmetic/num_responses"] == 36
        assert row[f"{rest}/num_missing"] == 3 * 2, "of the two problems that get no verdict"
        worst, mean, best = row[f"{rest}/worst@3/mean"], row[f"{core}/mean@3"], row[f"{core}/best@3/mean"]
        assert worst < mean < best <= row[f"{core}/pass@3"]
        assert row[f"{core}/mean@3/ci_low"] < mean < row[f"{core}/mean@3/ci_high"]
        assert row[f"{rest}/std@3"] > 0, "responses to a problem differ"
        assert 0 <= row[f"{core}/maj@3/mean"] <= 1
        assert {"val-aux/arithmetic/acc/pass@1", "val-aux/arithmetic/reward/best@2/mean"} <= row.keys()
    summary = json.loads((several["engines"].run_folder / "summary.json").read_text())
    accuracies = [summary[f"validation_accuracy_{which}"] for which in ("first", "last")]
    assert accuracies == [metrics[step][f"{core}/mean@3"] for step in (0, 2)]
    assert 0 <= summary["test_accuracy_last"] <= 1


def test_the_same_responses_are_drawn_whoever_answers(several: dict[str, TinyRun]):
    expected = validation_metrics(several["trainer"])
    assert expected[0] != expected[2]
    assert validation_metrics(several["engines"]) == expected
    assert validation_metrics(several["learner"]) == expected


def test_of_several_responses_the_first_is_shown(several: dict[str, TinyRun]):
    tables = {name: tables_of(run) for name, run in several.items()}
    assert [table.step for table in tables["trainer"]] == [0, 2]
    for found in zip(*tables.values(), strict=True):
        by_problem = [{sample.prompt_uid: (sample.output, sample.failure) for sample in one.samples} for one in found]
        assert [len(one) for one in by_problem] == [5, 5, 5], "as many problems as are to be shown"
        for uid in by_problem[0].keys() & by_problem[1].keys():
            assert by_problem[0][uid] == by_problem[1][uid]
        assert by_problem[1] == by_problem[2]


def test_several_responses_to_a_problem_when_a_policy_is_evaluated_alone(several: dict[str, TinyRun], tmp_path: Path):
    from rl_async_trainer.main import main  # rl-sync-trainer has the same command

    run = several["trainer"]
    changes = [f"--{name.replace('__', '.')}={value}" for name, value in SEVERAL.items()]
    changes += ["--schedule.max_staleness=2", f"--json={tmp_path}/found.json"]
    assert main(["validate", str(run.settings_file), *changes]) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text())["policies"].values()
    first = validation_metrics(run)[0]
    assert {name: found["validation"]["sources"][name] for name in first} == pytest.approx(first)
    assert "val-core/arithmetic/acc/mean@3" in found["test"]["sources"]
