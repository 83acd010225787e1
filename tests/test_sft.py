"""Supervised training equals transformers with AdamW, and is stopped, killed, resumed and continued like other runs."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_equality import learnt, metrics_without_clock
from safetensors.torch import load_file
from sft_rows import ROWS, make_chat_tokenizer, tokens_of
from tiny_run import TinyRun, copy_tiny_run, make_tiny_policy
from transformers import AutoModelForCausalLM

from rl_async_trainer.main import main as async_main
from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics
from rl_sync_trainer.main import main
from rl_sync_trainer.sft.training_run import SftRun

BATCH_SIZE = 4
STEPS = 10
SETTINGS = """[run]
name = "tiny"
directory = "{folder}/runs"
[policy]
path = "{folder}/policy"
[prompts]
train = "{folder}/train.jsonl"
validation = "{folder}/validation.jsonl"
max_tokens = 64
[sft]
batch_size = 4
shuffle = false
epochs = 2
[optimizer]
learning_rate = 1e-3
weight_decay = 0.1
clip_grad = 0.5
micro_batch_tokens = 48
num_threads = 1
products = "torch"
[trainer]
validate_every = 5
checkpoint_every = 2
[metrics]
console = "lines"
report = false
"""


def sft_here(run: TinyRun, *words: str) -> int:
    """Run the command in this process; return its exit status."""
    threads = torch.get_num_threads()
    try:
        return main(["sft", str(run.settings_file), *words])
    finally:
        torch.set_num_threads(threads)


def metrics_of(run: TinyRun, name: str) -> list[float]:
    return [row.metrics[name] for row in read_metrics(run.run_folder / "metrics.jsonl") if name in row.metrics]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of two epochs, ten steps."""
    folder = tmp_path_factory.mktemp("sft")
    make_tiny_policy(folder / "policy", make_chat_tokenizer())
    for name, rows in (("train", ROWS[:-3]), ("validation", ROWS[-3:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps({'messages': row})}\n" for row in rows))
    (folder / "settings.toml").write_text(SETTINGS.format(folder=folder))
    run = TinyRun(folder=folder)
    assert sft_here(run) == 0
    return run


@pytest.fixture
def run(finished: TinyRun, tmp_path: Path) -> TinyRun:
    """A copy of the inputs, without a run."""
    return copy_tiny_run(finished, tmp_path / "run")


def transformers_loss(model: Any, rows: Sequence[Any]) -> torch.Tensor:
    """The mean cross entropy that transformers computes of the trained tokens of padded conversations."""
    sequences = [tokens_of(row) for row in rows]
    longest = max(len(ids) for ids, _ in sequences)
    ids = torch.tensor([[*one, *[0] * (longest - len(one))] for one, _ in sequences])
    mask = torch.tensor([[*[1] * len(one), *[0] * (longest - len(one))] for one, _ in sequences])
    trained = torch.tensor([[*one, *[False] * (longest - len(one))] for _, one in sequences])
    labels = torch.where(trained, ids, -100)
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss  # type: ignore[no-any-return]


def test_ten_steps_equal_transformers_and_adamw(finished: TinyRun) -> None:
    load = partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager", dtype=torch.float32)
    model = load(finished.folder / "policy", trust_remote_code=False)
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    with torch.no_grad():
        validated = [transformers_loss(model, ROWS[-3:]).item()]
    losses, norms = [], []
    for step in range(STEPS):
        start = step % 5 * BATCH_SIZE
        loss = transformers_loss(model, ROWS[:-3][start : start + BATCH_SIZE])
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        adam.step()
        losses.append(loss.item())
    with torch.no_grad():
        validated.append(transformers_loss(model, ROWS[-3:]).item())
    assert metrics_of(finished, "sft/loss") == pytest.approx(losses, abs=1e-5)
    assert metrics_of(finished, "sft/grad_norm") == pytest.approx(norms, rel=1e-4)
    found = metrics_of(finished, "sft/validation_loss")
    assert [found[0], found[-1]] == pytest.approx(validated, abs=1e-5)
    assert metrics_of(finished, "sft/validation_perplexity") == pytest.approx([math.exp(one) for one in found])
    weights = load_file(finished.run_folder / "checkpoints" / "step_10" / "policy" / "model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=0, atol=1e-5)


def test_a_stopped_run_resumes_bit_for_bit(run: TinyRun, finished: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    step = SftRun._train_step

    def stopping(self: SftRun, *arguments: Any) -> Any:
        found = step(self, *arguments)
        if self._state.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(SftRun, "_train_step", stopping)
    assert sft_here(run) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert sft_here(run, "--resume") == 0
    assert learnt(run, step=STEPS) == learnt(finished, step=STEPS)
    assert metrics_without_clock(run) == metrics_without_clock(finished)
    events = [event["event"] for event in read_events(run.run_folder / "events.jsonl")]
    assert [name for name in events if name.startswith("run_")] == [
        *("run_started", "run_stopped", "run_started", "run_resumed", "run_finished")
    ]


def test_a_killed_run_resumes_bit_for_bit(run: TinyRun, finished: TinyRun) -> None:
    words = [sys.executable, "-m", "rl_sync_trainer.main", "sft", str(run.settings_file)]
    process = subprocess.Popen([*words, "--metrics.console=off"])
    deadline = time.monotonic() + 120
    while not (run.run_folder / "checkpoints" / "step_4" / "manifest.json").exists():
        assert time.monotonic() < deadline
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert sft_here(run, "--resume") == 0
    assert learnt(run, step=STEPS) == learnt(finished, step=STEPS)
    assert metrics_without_clock(run) == metrics_without_clock(finished)


def test_changed_demonstrations_are_refused_on_resume(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert sft_here(run, "--sft.epochs=1") == 0
    file = run.folder / "train.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    assert sft_here(run, "--resume") == 2
    assert "the run's demonstrations have changed" in capsys.readouterr().err


def test_two_ranks_train_as_one(run: TinyRun, finished: TinyRun) -> None:
    words = ["--parallel.ranks=2", "--cluster.placement=process", "--sft.epochs=1", "--prompts.validation=none"]
    assert sft_here(run, *words) == 0
    assert metrics_of(run, "sft/loss") == pytest.approx(metrics_of(finished, "sft/loss")[:5], abs=1e-5)


def test_an_adapter_is_trained_and_exported(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert sft_here(run, "--lora.rank=2", "--sft.epochs=1", "--trainer.validate_first=false") == 0
    adapter = run.run_folder / "checkpoints" / "step_5" / "adapter"
    assert any(
        tensor.any() for name, tensor in load_file(adapter / "adapter_model.safetensors").items() if "lora_B" in name
    )
    train = ["train", f"--policy.path={run.run_folder}", f"--prompts.train={run.folder}/train.jsonl"]
    assert main(train) == 2
    assert f"Write the model first: `export {run.run_folder} FOLDER`" in capsys.readouterr().err
    assert main(["export", str(run.run_folder), str(run.folder / "merged")]) == 0
    assert (run.folder / "merged" / "config.json").is_file()


@pytest.mark.parametrize(("trainer", "option"), [(main, []), (async_main, []), (main, ["--best"])])
def test_training_starts_from_the_policy_of_a_run(
    trainer: Any, option: list[str], finished: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [{"role": "user", "content": "1"}], "answer": "2"}\n')
    words = [f"--policy.path={finished.run_folder}", f"--prompts.train={prompts}", "--reward.function=exact_match"]
    sizes = ["--prompts.max_tokens=8", "--rollout.max_response_tokens=8", "--rollout.prompts_per_step=1"]
    engine = ["--rollout.engine=transformers", f"--run.directory={tmp_path}"]
    assert trainer(["train", *words, *sizes, *engine, *option, "--dry-run"]) == 0
    policy = finished.run_folder / "checkpoints" / "step_10" / "policy"
    assert f"float32, policy {policy}\n" in capsys.readouterr().out


@pytest.mark.parametrize("option", [[], ["--best"]])
def test_a_resumed_run_keeps_the_policy_of_a_run_that_went_on(
    option: list[str], finished: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(finished.run_folder, base)
    words = ["sft", str(finished.settings_file), f"--policy.path={base}", f"--run.directory={tmp_path}"]
    words += ["--run.name=next", "--sft.epochs=1", "--trainer.validate_every=0", *option]
    assert main(words) == 0
    first = base / "checkpoints" / "step_10"
    if option:
        (base / "metrics.jsonl").unlink()  # it has no best checkpoint any more
    shutil.copytree(first, base / "checkpoints" / "step_15")
    assert main([*words, "--resume", "--sft.epochs=2"]) == 0
    assert f"policy: {first}/policy\n" in capsys.readouterr().out
    shutil.rmtree(first)
    assert main([*words, "--resume"]) == 2
    assert f"policy.path: {first}/policy, from which the run started, is gone." in capsys.readouterr().err


def test_dropped_demonstrations_and_the_learner_are_in_the_plan(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompts.max_tokens=16", "--prompts.overlong=drop", "--lora.rank=2", "--dry-run"]
    assert sft_here(run, *words) == 0
    shown = capsys.readouterr()
    plan, notes = shown.out, shown.out + shown.err
    kept = sum(len(tokens_of(row)[0]) <= 16 for row in ROWS)
    assert f"note: {len(ROWS) - kept} demonstrations are dropped, because they have more tokens than prompts" in notes
    assert f"float32, policy {run.folder}/policy\n" in plan
    assert all(
        line in plan for line in ("one rank, in this process", "learning rate 0.001", "  memory  ", "rank 2, B @ A")
    )
    assert "lora.serving" not in plan


def test_what_sft_does_not_use_is_refused_by_name(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    unused = ["--rollout.group_size=4", "--reward.function=exact_match", "--trainer.minibatches=2"]
    assert sft_here(run, *unused) == 2
    refused = capsys.readouterr().err
    assert all(
        f"{word[2:].partition('=')[0]} (command line) has no effect in `sft`. Leave it out." in refused
        for word in unused
    )
    assert sft_here(run, "--trainer.steps=7") == 2
    assert "sft.epochs = 2 is 10 steps; found trainer.steps = 7" in capsys.readouterr().err
    assert async_main(["sft", str(run.settings_file)]) == 2
    assert "use `rl-sync-trainer sft`, then `train --policy.path=RUN`" in capsys.readouterr().err


def test_the_help_explains_the_settings_of_sft_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n[{section}]" in shown for section in ("sft", "optimizer", "lora", "parallel"))
    assert not any(f"\n[{section}]" in shown for section in ("rollout", "reward", "algorithm"))
    assert main(["sft", "--help", "sft.epochs"]) == 0
    assert "--sft.epochs=integer | none" in capsys.readouterr().out
