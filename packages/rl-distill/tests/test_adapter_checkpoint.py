"""Checkpoints of adapters hold only A, B and moments; they resume bit for bit in any layout, on their own base."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch_learner import TorchLearner
from transformers import AutoModelForCausalLM

from rl_core.data.batch import Batch
from rl_core.errors import CheckpointError, DataError
from rl_core.weights import PEFT_PREFIX
from rl_distill.architecture.lora_targets import adapter_shapes
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.checkpoints.checkpoint import read_header, state_shapes
from rl_distill.checkpoints.merged_folder import merge_adapter
from rl_distill.checkpoints.pieces import Piece, TensorFolder
from rl_distill.learner import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.options import LoraOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
LENGTHS = (7, 3, 12, 3)
OPTIONS = LearnerOptions(
    learning_rate=1e-2, warmup_steps=2, decay_steps=9, num_threads=1, micro_batch_tokens=16, eps=1e-6
)
LORA = LoraOptions(rank=4, alpha=6, rslora=True)


def train(learner: Any, make_batch: MakeBatch, seeds: range) -> list[Any]:
    return [learner.train_step(make_batch(LENGTHS, seed=seed), supervised_objective) for seed in seeds]


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint's state."""
    folder = TensorFolder(checkpoint / "state")
    pieces = [
        Piece(name=name, shape=shape, offsets=(0,) * len(shape), tensor=torch.zeros(shape))
        for name, shape in folder.shapes().items()
    ]
    folder.read(pieces)
    return {piece.name: piece.tensor for piece in pieces}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.fixture(scope="module")
def saved(tied_policy: Path, make_batch: MakeBatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint after two steps."""
    directory = tmp_path_factory.mktemp("adapter-checkpoint")
    learner = MegatronLearner(tied_policy, OPTIONS, lora=LORA)
    train(learner, make_batch, range(2))
    learner.save(directory)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one(dtype: str, untied_policy: Path, make_batch: MakeBatch, tmp_path: Path):
    options, lora = replace(OPTIONS, dtype=dtype), replace(LORA, dropout=0.1)
    learner = MegatronLearner(untied_policy, options, lora=lora)
    train(learner, make_batch, range(2))
    learner.save(tmp_path / "checkpoint")

    fresh = MegatronLearner(untied_policy, options, lora=lora)
    train(fresh, make_batch, range(20, 22))  # these moments and steps must not survive the load
    fresh.load(tmp_path / "checkpoint")

    assert fresh.step == 2
    assert train(fresh, make_batch, range(2, 4)) == train(learner, make_batch, range(2, 4))
    assert_same(dict(fresh.export_adapter()), dict(learner.export_adapter()))


LAYOUTS = {
    "TP2SP": ParallelOptions(ranks=2, tensor=2, sequence=True),
    "PP2": ParallelOptions(ranks=2, pipeline=2),
    "DP2": ParallelOptions(ranks=2, distributed_optimizer=True),
    "EP2": ParallelOptions(ranks=2, expert=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_goes_into_other_layouts_and_back(
    layout: str, tied_policy: Path, mixture_policy: Path, make_batch: MakeBatch, two_ranks: Any, tmp_path: Path
):
    policy = mixture_policy if layout == "EP2" else tied_policy
    alone = MegatronLearner(policy, OPTIONS, lora=LORA)
    train(alone, make_batch, range(2))
    alone.save(tmp_path / "first")
    spread = MegatronLearner(policy, OPTIONS, ranks=two_ranks.in_layout(LAYOUTS[layout]), lora=LORA)
    spread.load(tmp_path / "first")
    spread.save(tmp_path / "spread")
    again = MegatronLearner(policy, OPTIONS, lora=LORA)
    again.load(tmp_path / "spread")

    assert train(again, make_batch, range(2, 4)) == train(alone, make_batch, range(2, 4))
    assert_same(contents(tmp_path / "spread"), contents(tmp_path / "first"))
    for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "learner.json"):
        assert (tmp_path / "spread" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


def test_it_has_the_adapter_and_its_moments_alone(saved: Path, tied_policy: Path):
    config = parse_policy_config(read_policy_config(tied_policy))
    shapes = adapter_shapes(config, LORA)
    state, adapter = contents(saved), load_file(saved / "adapter" / "adapter_model.safetensors")

    assert sorted(path.name for path in saved.iterdir()) == ["adapter", "learner.json", "state"]
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == state_shapes(shapes, config)
    assert all(bool(tensor.abs().sum() > 0) for tensor in state.values())
    assert_same({PEFT_PREFIX + name: state[f"weights/{name}"] for name in shapes}, adapter)


def test_a_learner_begins_with_the_adapter_of_a_checkpoint(saved: Path, tied_policy: Path, tmp_path: Path):
    learner = MegatronLearner(tied_policy, OPTIONS, lora=LORA)
    learner.load(saved)
    begun = MegatronLearner(tied_policy, OPTIONS, lora=replace(LORA, path=saved / "adapter"))
    assert begun.step == 0
    assert_same(dict(begun.export_adapter()), dict(learner.export_adapter()))
    with pytest.raises(DataError, match="rank is 4, this learner's 8"):
        MegatronLearner(tied_policy, OPTIONS, lora=replace(LORA, rank=8, path=saved / "adapter"))


def test_a_merge_of_every_family_is_what_the_learner_exports(
    family_policy: Path, make_batch: MakeBatch, tmp_path: Path
):
    learner = MegatronLearner(family_policy, OPTIONS, lora=LORA)
    train(learner, make_batch, range(2))
    learner.save(tmp_path / "saved")
    merge_adapter(tmp_path / "saved" / "adapter", tmp_path / "merged")

    merged, batch = MegatronLearner(tmp_path / "merged", OPTIONS), make_batch(LENGTHS, seed=5)
    assert_same(dict(merged.export_weights()), dict(learner.export_weights()))
    np.testing.assert_allclose(merged.logprobs(batch).values, learner.logprobs(batch).values, rtol=0, atol=1e-5)
    assert (tmp_path / "merged" / "tokenizer_config.json").read_text() == '{"made": "for a test"}'
    _, said = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True, trust_remote_code=False
    )
    assert not any(said.values()), said


def test_an_adapter_in_bfloat16_merges_into_a_base_in_float32(tied_policy: Path, make_batch: MakeBatch, tmp_path: Path):
    options = replace(OPTIONS, dtype="bfloat16")
    learner = MegatronLearner(tied_policy, options, lora=LORA)
    train(learner, make_batch, range(2))
    learner.save(tmp_path / "saved")
    merge_adapter(tmp_path / "saved" / "adapter", tmp_path / "merged")

    exported = dict(learner.export_weights())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == exported.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, exported[name].float(), rtol=2**-6, atol=2**-9)


def test_killed_anywhere_the_old_or_the_new_one_is_whole(tied_policy: Path, tmp_path: Path):
    """SIGKILL before every sixth file operation, in separate processes: see adapter_killer.py."""
    command = [sys.executable, "-m", "adapter_killer", tmp_path, tied_policy]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    *killed, undisturbed = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(killed) > 6
    assert undisturbed == {"killed": False, "step": 2, "is_equal": True}
    assert {(row["killed"], row["is_equal"]) for row in killed} == {(True, True)}
    assert {row["step"] for row in killed} <= {1, 2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 8}, "rank is 4, this learner's 8. Restore its .lora. settings"),
        ({"alpha": None}, r"alpha is 6\.0, this learner's 8\.0"),
        ({"rslora": False}, "rslora is True, this learner's False"),
        ({"target_modules": ("q_proj",)}, r"it also adapts 'model\.layers\.0\.mlp\.down_proj' and 11 others"),
        ({"rank": 0}, "trained an adapter; this learner trains all weights. Set lora.rank = 4"),
    ],
    ids=str,
)
def test_another_adapter_does_not_go_on(changes: dict[str, Any], says: str, saved: Path, tied_policy: Path):
    learner = MegatronLearner(tied_policy, OPTIONS, lora=replace(LORA, **changes))
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
    with pytest.raises(CheckpointError, match=says):
        learner.load(saved)
    assert learner.step == 0
    assert_same(dict(learner.export_weights()), before)


def test_full_training_and_adapters_do_not_go_on_as_each_other(saved: Path, tied_policy: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"an adapter; this learner trains all weights. Set lora\.rank = 4"):
        TorchLearner(tied_policy, OPTIONS).load(saved)
    MegatronLearner(tied_policy, OPTIONS).save(tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"all weights; this learner trains an adapter. Set lora\.rank = 0"):
        MegatronLearner(tied_policy, OPTIONS, lora=LORA).load(tmp_path / "full")


def test_an_adapter_belongs_to_its_base(
    saved: Path, tied_policy: Path, policy_writer: Callable[..., Path], tmp_path: Path
):
    other, small = tmp_path / "other", policy_writer(tmp_path / "small", num_hidden_layers=1)
    full = MegatronLearner(tied_policy, OPTIONS)
    weights = dict(full.export_weights())
    weights["model.norm.weight"][3] += 1e-3
    full.save(tmp_path / "changed")
    (tmp_path / "changed" / "policy").rename(other)

    with pytest.raises(CheckpointError, match="of an adapter on another base model: it was trained on the model"):
        MegatronLearner(other, OPTIONS, lora=LORA).load(saved)
    with pytest.raises(CheckpointError, match="of another model: num_layers is 2, this policy's 1"):
        MegatronLearner(small, OPTIONS, lora=LORA).load(saved)
    shutil.copytree(saved / "adapter", tmp_path / "alone")
    with pytest.raises(DataError, match="has different weights from the base model of"):
        merge_adapter(tmp_path / "alone", tmp_path / "merged", base=other)
    with pytest.raises(DataError, match="was trained on a base model whose weights differ from this policy's"):
        MegatronLearner(other, OPTIONS, lora=replace(LORA, path=tmp_path / "alone"))


@pytest.mark.parametrize(
    "adapter",
    [
        [],
        {},
        {"rank": True},
        {"alpha": "6"},
        {"rslora": 1},
        {"modules": "q_proj"},
        {"modules": [1]},
        {"base": None},
        {"base": {"path": 3, "digest": "0"}},
        {"base": {"path": None, "digest": 0}},
        {"base": {"path": None}},
    ],
    ids=str,
)
def test_a_header_that_no_learner_writes_is_refused(adapter: Any, saved: Path, tied_policy: Path, tmp_path: Path):
    header = json.loads((saved / "learner.json").read_text())
    is_part = isinstance(adapter, dict) and adapter
    header["adapter"] = {**header["adapter"], **adapter} if is_part else adapter
    (tmp_path / "learner.json").write_text(json.dumps(header))
    config = parse_policy_config(read_policy_config(tied_policy))
    with pytest.raises(CheckpointError, match=r"learner\.json is damaged: .* at `\$\.adapter"):
        read_header(tmp_path, config=config, dtype="float32")
