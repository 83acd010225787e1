"""Checkpoints resume bit for bit, load into either learner, and are refused if torn."""

import itertools
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from safetensors.torch import load_file, save_file
from tensor_folders import damage
from torch_learner import TorchLearner
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3ForTokenClassification

from rl_core.cluster import ClusterOptions
from rl_core.data.batch import Batch
from rl_core.errors import CheckpointError, DataError
from rl_distill.checkpoints.pieces import Piece, TensorFolder
from rl_distill.learner import LearnerOptions, MetricSums, MicroBatch
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.objectives import supervised_objective
from rl_distill.options import ParallelOptions

MakeBatch = Callable[..., Batch]
LENGTHS = (7, 3, 12, 3)
OPTIONS = LearnerOptions(
    learning_rate=1e-3, weight_decay=0.1, warmup_steps=2, decay_steps=9, num_threads=1, micro_batch_tokens=16, eps=1e-6
)


def train(learner: Any, make_batch: MakeBatch, seeds: range) -> list[Any]:
    return [learner.train_step(make_batch(LENGTHS, seed=seed), supervised_objective) for seed in seeds]


def squared_error(values: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, MetricSums]:
    return ((values - micro.columns["advantages"]).square() * micro.columns["loss_weights"]).sum(), {}


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
    train(fresh, make_batch, range(20, 22))  # these moments and steps must not survive the load
    fresh.load(tmp_path / "checkpoint")

    assert fresh.step == steps
    assert train(fresh, make_batch, range(2, 4)) == train(learner, make_batch, range(2, 4))
    expected = learner.export_weights()
    assert different_tensors(expected, fresh.export_weights()) == []


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
        expected, found = (train(learner, make_batch, range(2, 4)) for learner in (first, second))
        assert [one.step for one in found] == [one.step for one in expected] == [3, 4]
        assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=tolerance)
        norms = [one.grad_norm for one in expected]
        assert [one.grad_norm for one in found] == pytest.approx(norms, rel=tolerance)


def test_the_policy_is_a_hugging_face_folder(saved: Path, tied_policy: Path):
    model = Qwen3ForCausalLM.from_pretrained(saved / "policy")
    learner = MegatronLearner(saved / "policy", OPTIONS)

    assert (saved / "policy" / "tokenizer_config.json").read_text() == '{"made": "for a test"}'
    parameters = dict(model.named_parameters())
    assert different_tensors(parameters, learner.export_weights()) == []
    assert json.loads((saved / "policy" / "config.json").read_text())["dtype"] == "float32"


def values_of(model: Any, batch: Batch, kind: str) -> np.ndarray[Any, Any]:
    """Return a model's output for each token, computed from the preceding tokens; 0 for the first, as in learners."""
    ids, found = batch.ragged("input_ids"), []
    for start, stop in itertools.pairwise(ids.offsets):
        tokens = torch.from_numpy(ids.values[start:stop].astype(np.int64))[None]
        logits = model(input_ids=tokens).logits[0, :-1].detach()
        if kind == "logprobs":
            logits = torch.log_softmax(logits, dim=-1).gather(-1, tokens[0, 1:, None])
        found.append(np.concatenate([[0.0], logits[:, 0].numpy()]))
    return np.concatenate(found)


def load_whole(kind: Any, folder: Path) -> Any:
    """Load a model with transformers; check that no weight is missing or unexpected."""
    model, said = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return model.eval()


def test_every_familys_policy_is_transformers_own(family_policy: Path, make_batch: MakeBatch, tmp_path: Path):
    learner = MegatronLearner(family_policy, OPTIONS)
    train(learner, make_batch, range(1))
    learner.save(tmp_path / "saved")

    model = load_whole(AutoModelForCausalLM, tmp_path / "saved" / "policy")

    batch = make_batch(LENGTHS, seed=5)
    expected = values_of(model, batch, "logprobs")
    np.testing.assert_allclose(learner.logprobs(batch).values, expected, rtol=0, atol=1e-5)


def test_a_critic_is_a_token_classifier_and_goes_on(tied_policy: Path, make_batch: MakeBatch, tmp_path: Path):
    critic = MegatronCritic(tied_policy, OPTIONS)
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(4)]
    for batch in batches[:2]:
        critic.train_step(batch, squared_error)
    critic.save(tmp_path / "saved")

    model = load_whole(Qwen3ForTokenClassification, tmp_path / "saved" / "policy")
    expected = values_of(model, batches[0], "values")
    assert float(np.abs(expected).max()) > 1e-4
    np.testing.assert_allclose(critic.values(batches[0]).values, expected, rtol=0, atol=1e-5)

    again = MegatronCritic(tied_policy, OPTIONS)
    again.load(tmp_path / "saved")
    for batch in batches[2:]:
        assert again.train_step(batch, squared_error) == critic.train_step(batch, squared_error)


def test_a_critic_is_no_policy(saved: Path, tied_policy: Path, tmp_path: Path):
    critic = MegatronCritic(tied_policy, OPTIONS)
    with pytest.raises(CheckpointError, match=r"has no tensor 'weights/score\.weight'"):
        critic.load(saved)
    critic.save(tmp_path / "critic")
    for kind in (MegatronLearner, TorchLearner):
        with pytest.raises(CheckpointError, match=r"has a tensor '\w+/score\.(weight|bias)', which this model"):
            kind(tied_policy, OPTIONS).load(tmp_path / "critic")


def test_the_state_lies_under_hugging_face_names(saved: Path):
    weights = load_file(saved / "policy" / "model.safetensors")
    header = json.loads((saved / "learner.json").read_text())
    folder = TensorFolder(saved / "state")
    kinds = ("weights", "exp_avg", "exp_avg_sq")

    shapes = {f"{kind}/{name}": tuple(tensor.shape) for kind in kinds for name, tensor in weights.items()}
    assert folder.shapes() == shapes
    pieces = {
        name: Piece(name=name, shape=shape, offsets=(0,) * len(shape), tensor=torch.zeros(shape))
        for name, shape in shapes.items()
    }
    folder.read(list(pieces.values()))
    assert weights
    assert all(torch.equal(pieces[f"weights/{name}"].tensor, tensor) for name, tensor in weights.items())
    assert all(bool(piece.tensor.abs().sum() > 0) for piece in pieces.values())
    assert header["step"] == 2
    assert header["options"]["learning_rate"] == 1e-3


def test_a_save_in_the_background_is_of_its_moment(tied_policy: Path, make_batch: MakeBatch, tmp_path: Path):
    learner = MegatronLearner(tied_policy, OPTIONS)
    pending = []
    for step in range(3):
        train(learner, make_batch, range(step, step + 1))
        pending.append(learner.save(tmp_path / str(step), in_background=True))
    for save in reversed(pending):  # each save waits for its own directory
        save.wait()
        save.wait()

    for step in range(3):
        loaded, expected = MegatronLearner(tied_policy, OPTIONS), MegatronLearner(tied_policy, OPTIONS)
        loaded.load(tmp_path / str(step))
        train(expected, make_batch, range(step + 1))
        assert loaded.step == step + 1
        weights = expected.export_weights()
        assert different_tensors(weights, loaded.export_weights()) == []


def test_a_save_in_the_background_survives_the_end_of_its_learner(tied_policy: Path, tmp_path: Path):
    learner = MegatronLearner(tied_policy, OPTIONS)
    pending = learner.save(tmp_path / "saved", in_background=True)
    learner.close()
    pending.wait()
    MegatronLearner(tied_policy, OPTIONS).load(tmp_path / "saved")


def test_a_save_that_failed_says_so_each_time(tied_policy: Path, tmp_path: Path):
    learner = MegatronLearner(tied_policy, OPTIONS)
    (tmp_path / "saved").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        pending = learner.save(tmp_path / "saved", in_background=True)
        for _ in range(2):
            with pytest.raises((OSError, CheckpointError), match=r"too large|could not be written"):
                pending.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(CheckpointError, match=r"learner\.json does not exist"):
        learner.load(tmp_path / "saved")


def test_save_refuses_a_directory_in_use(saved: Path, tied_policy: Path):
    with pytest.raises(CheckpointError, match="must be empty"):
        MegatronLearner(tied_policy, OPTIONS).save(saved)


FILES = ("learner.json", "state/pieces.json", "state/rank-00000.safetensors")


def unchanged(learner: Any) -> Callable[[], bool]:
    """Return a function that checks whether the learner has changed since."""
    step, before = learner.step, {name: tensor.clone() for name, tensor in learner.export_weights().items()}

    def is_unchanged() -> bool:
        weights = learner.export_weights()
        return bool(learner.step == step and all(torch.equal(before[name], weights[name]) for name in before))

    return is_unchanged


@pytest.mark.parametrize("kind", [MegatronLearner, TorchLearner])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["missing", "torn", "empty", "folder", "pipe"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    kind: Any, file: str, how: str, copied: Path, tied_policy: Path
):
    damage(copied / file, how)
    learner = kind(tied_policy, OPTIONS)
    is_unchanged = unchanged(learner)

    with pytest.raises(CheckpointError, match=Path(file).name):
        learner.load(copied)

    assert is_unchanged()


def test_a_missing_or_misshapen_tensor_is_named(copied: Path, tied_policy: Path):
    learner = MegatronLearner(tied_policy, OPTIONS)
    is_unchanged = unchanged(learner)
    name = "exp_avg/model.layers.1.mlp.up_proj.weight"

    index = copied / "state" / "pieces.json"
    entries = json.loads(index.read_bytes())
    (entry,) = [entry for entry in entries if entry["name"] == name]
    entry["shape"] = [2, 2]
    index.write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=rf"{name}' must have shape \[48, 32\].*; found \[2, 2\]"):
        learner.load(copied)
    entries.remove(entry)
    index.write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=rf"has no tensor '{name}'; this model needs it with shape \[48, 32\]"):
        learner.load(copied)
    assert is_unchanged()


def test_what_one_rank_cannot_read_changes_no_rank(tied_policy: Path, make_batch: MakeBatch, tmp_path: Path):
    """Only rank 1 needs data from the second file; all ranks keep their state."""
    parallel = ParallelOptions(ranks=2, pipeline=2)
    ranks = LearnerRanks(parallel, cluster=ClusterOptions(kind="process"), num_threads=1, deadline_s=120.0)
    try:
        learner = MegatronLearner(tied_policy, OPTIONS, ranks=ranks)
        train(learner, make_batch, range(1))
        learner.save(tmp_path / "saved")
        train(learner, make_batch, range(1, 2))
        is_unchanged = unchanged(learner)
        path = tmp_path / "saved" / "state" / "rank-00001.safetensors"
        contents = bytearray(path.read_bytes())
        contents[len(contents) // 2] ^= 1
        path.write_bytes(contents)

        with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged: .*differs from its entry"):
            learner.load(tmp_path / "saved")

        assert is_unchanged()
        contents[len(contents) // 2] ^= 1
        path.write_bytes(contents)
        learner.load(tmp_path / "saved")
        assert learner.step == 1
        assert train(learner, make_batch, range(1, 2))[0].step == 2
    finally:
        ranks.close()


def test_another_model_or_dtype_is_refused(saved: Path, tied_policy: Path, untied_policy: Path):
    with pytest.raises(CheckpointError, match=r"another model: .* is .*, this policy's "):
        MegatronLearner(untied_policy, OPTIONS).load(saved)
    with pytest.raises(CheckpointError, match="dtype = 'float32'"):
        MegatronLearner(tied_policy, replace(OPTIONS, dtype="bfloat16")).load(saved)


def test_a_place_that_cannot_be_written_is_named(tied_policy: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    learner = MegatronLearner(tied_policy, OPTIONS)
    with pytest.raises(CheckpointError, match=r"cannot save into .*file/saved"):
        learner.save(tmp_path / "file" / "saved")


def test_a_policy_folder_is_checked(tied_policy: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((tied_policy / "config.json").read_bytes())
    with pytest.raises(DataError, match=r"neither model\.safetensors nor"):
        MegatronLearner(tmp_path, OPTIONS)

    (tmp_path / "model.safetensors").write_bytes((tied_policy / "model.safetensors").read_bytes()[:-5])
    with pytest.raises(DataError, match="truncated"):
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

    assert different_tensors(tensors, found) == []
    weight_map[names[0]] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DataError, match="own folder"):
        MegatronLearner(tmp_path, OPTIONS)
