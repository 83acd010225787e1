"""Checkpoints continue bit for bit, load into either learner, and are refused when torn."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from rl_core.batch import Batch
from rl_core.errors import CheckpointError, DataError
from rl_distill.learner import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.supervised import supervised_objective
from rl_distill.torch_learner import TorchLearner

MakeBatch = Callable[..., Batch]
LENGTHS = (7, 3, 12, 3)
OPTIONS = LearnerOptions(
    learning_rate=1e-3, weight_decay=0.1, warmup_steps=2, decay_steps=9, num_threads=1, micro_batch_tokens=16, eps=1e-6
)


def train(learner: Any, make_batch: MakeBatch, seeds: range) -> list[Any]:
    return [learner.train_step(make_batch(LENGTHS, seed=seed), supervised_objective) for seed in seeds]


@pytest.fixture(scope="module")
def saved(tied_policy: Path, make_batch: MakeBatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    learner = MegatronLearner(tied_policy, OPTIONS)
    train(learner, make_batch, range(2))
    learner.save(directory)
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    for path in saved.rglob("*"):
        if path.is_file():
            target = tmp_path / "copy" / path.relative_to(saved)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "copy"


@pytest.mark.parametrize("kind", [MegatronLearner, TorchLearner])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_resumed_run_is_the_uninterrupted_one(
    kind: Any, dtype: str, steps: int, untied_policy: Path, make_batch: MakeBatch, tmp_path: Path
):
    options = replace(OPTIONS, dtype=dtype)
    learner = kind(untied_policy, options)
    train(learner, make_batch, range(steps))
    learner.save(tmp_path / "checkpoint")

    fresh = kind(untied_policy, replace(options, seed=9))
    train(fresh, make_batch, range(20, 22))  # its own moments and steps must not survive the load
    fresh.load(tmp_path / "checkpoint")

    assert fresh.step == steps
    assert train(fresh, make_batch, range(2, 4)) == train(learner, make_batch, range(2, 4))
    expected = learner.export_weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fresh.export_weights().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_either_learner_loads_the_others_checkpoint(
    dtype: str, tied_policy: Path, make_batch: MakeBatch, tmp_path: Path
):
    options = replace(OPTIONS, dtype=dtype)
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    for writer, reader in ((MegatronLearner, TorchLearner), (TorchLearner, MegatronLearner)):
        first, second = writer(tied_policy, options), reader(tied_policy, options)
        train(first, make_batch, range(2))
        first.save(tmp_path / writer.__name__)
        second.load(tmp_path / writer.__name__)
        for expected, found in zip(
            *(train(learner, make_batch, range(2, 4)) for learner in (first, second)), strict=False
        ):
            assert found.step == expected.step
            assert found.loss == pytest.approx(expected.loss, rel=tolerance)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)


def test_the_policy_is_a_hugging_face_folder(saved: Path, tied_policy: Path):
    model = Qwen3ForCausalLM.from_pretrained(saved / "policy")
    learner = MegatronLearner(saved / "policy", OPTIONS)

    assert (saved / "policy" / "tokenizer_config.json").read_text() == '{"made": "for a test"}'
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in learner.export_weights().items())
    assert json.loads((saved / "policy" / "config.json").read_text())["dtype"] == "float32"


def test_moments_lie_under_hugging_face_names(saved: Path):
    weights = load_file(saved / "policy" / "model.safetensors")
    header = json.loads((saved / "learner.json").read_text())

    for name in ("exp_avg", "exp_avg_sq"):
        moments = load_file(saved / "optimizer" / f"{name}.safetensors")
        assert {n: t.shape for n, t in moments.items()} == {n: t.shape for n, t in weights.items()}
        assert all(bool(t.abs().sum() > 0) for t in moments.values())
    assert header["step"] == 2
    assert header["options"]["learning_rate"] == 1e-3


def test_save_refuses_a_directory_in_use(saved: Path, tied_policy: Path):
    with pytest.raises(CheckpointError, match="must be empty"):
        MegatronLearner(tied_policy, OPTIONS).save(saved)


FILES = (
    "learner.json",
    "policy/model.safetensors",
    "optimizer/exp_avg.safetensors",
    "optimizer/exp_avg_sq.safetensors",
)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "torn", "empty"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    file: str, damage: str, copied: Path, tied_policy: Path, make_batch: MakeBatch
):
    path = copied / file
    contents = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(contents[: len(contents) // 2] if damage == "torn" else b"")
    learner = MegatronLearner(tied_policy, OPTIONS)
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}

    with pytest.raises(CheckpointError, match=Path(file).name):
        learner.load(copied)

    assert learner.step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.export_weights().items())


def test_a_missing_or_misshapen_tensor_is_named(copied: Path, tied_policy: Path):
    learner = MegatronLearner(tied_policy, OPTIONS)
    path = copied / "optimizer" / "exp_avg.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"

    save_file({n: t for n, t in tensors.items() if n != name}, path)
    with pytest.raises(CheckpointError, match=rf"exp_avg\.safetensors has no tensor '{name}'"):
        learner.load(copied)
    save_file({**tensors, name: torch.zeros(2, 2)}, path)
    with pytest.raises(CheckpointError, match=rf"{name}' must have shape \[48, 32\]; found \[2, 2\]"):
        learner.load(copied)


def test_another_model_or_dtype_is_refused(saved: Path, tied_policy: Path, untied_policy: Path):
    with pytest.raises(CheckpointError, match="another model"):
        MegatronLearner(untied_policy, OPTIONS).load(saved)
    with pytest.raises(CheckpointError, match="dtype = 'float32'"):
        MegatronLearner(tied_policy, replace(OPTIONS, dtype="bfloat16")).load(saved)


def test_a_header_of_another_kind_is_refused(copied: Path, tied_policy: Path):
    learner = MegatronLearner(tied_policy, OPTIONS)
    path = copied / "learner.json"
    header = json.loads(path.read_text())

    path.write_text(json.dumps({**header, "format_version": 99}))
    with pytest.raises(CheckpointError, match="format_version 99"):
        learner.load(copied)
    path.write_text(json.dumps({**header, "step": -1}))
    with pytest.raises(CheckpointError, match="step -1"):
        learner.load(copied)
    path.write_text("[1]")
    with pytest.raises(CheckpointError, match="not written by a learner"):
        learner.load(copied)


def test_a_policy_folder_is_checked(tied_policy: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((tied_policy / "config.json").read_bytes())
    with pytest.raises(DataError, match=r"neither model\.safetensors nor"):
        MegatronLearner(tmp_path, OPTIONS)

    (tmp_path / "model.safetensors").write_bytes((tied_policy / "model.safetensors").read_bytes()[:-5])
    with pytest.raises(DataError, match="torn"):
        MegatronLearner(tmp_path, OPTIONS)


def test_a_sharded_folder_is_read(tied_policy: Path, tmp_path: Path):
    tensors = load_file(tied_policy / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((tied_policy / "config.json").read_bytes())

    found = MegatronLearner(tmp_path, OPTIONS).export_weights()

    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())
    weight_map[names[0]] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DataError, match="own folder"):
        MegatronLearner(tmp_path, OPTIONS)
