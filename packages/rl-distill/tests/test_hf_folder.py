"""Folders of safetensors: read in parts, refused if torn, and written in shards."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from equal_tensors import different_tensors
from refusals import refusal
from safetensors.torch import load_file, save_file

from rl_core.errors import DataError, SettingsError
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.checkpoints.hf_folder import (
    INDEX_FILE,
    WEIGHTS_FILE,
    PolicyTensors,
    tensor_shapes,
    write_policy_folder,
)
from rl_distill.stepping import open_policy

EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


def config_of(policy_dir: Path) -> PolicyConfig:
    return parse_policy_config(read_policy_config(policy_dir))


def save_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]], **index: Any) -> Path:
    """Write tensors by file, and an index."""
    directory.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": {**weight_map, **index}}))
    return directory


def halves(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    names = sorted(tensors)
    middle = len(names) // 2
    files = {"model-00001-of-00002.safetensors": names[:middle], "model-00002-of-00002.safetensors": names[middle:]}
    return {file: {name: tensors[name] for name in part} for file, part in files.items()}


def test_shapes_are_those_that_transformers_writes(family_policy: Path):
    stored = load_file(family_policy / WEIGHTS_FILE)

    assert tensor_shapes(config_of(family_policy)) == {name: tuple(tensor.shape) for name, tensor in stored.items()}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_rectangle_is_read_and_nothing_else(mixture_policy: Path, tmp_path: Path, is_sharded: bool):
    stored = load_file(mixture_policy / WEIGHTS_FILE)
    folder = save_shards(tmp_path, halves(stored)) if is_sharded else mixture_policy
    tensors = PolicyTensors(folder, config_of(mixture_policy))

    found = tensors.read(EMBEDDING, (8, 4), (20, 28), dtype=torch.float32)

    assert torch.equal(found, stored[EMBEDDING][8:28, 4:32])
    assert tensors.num_bytes_read == 20 * 28 * 4
    assert torch.equal(
        tensors.read("model.norm.weight", (2,), (3,), dtype=torch.float32), stored["model.norm.weight"][2:5]
    )
    assert tensors.read(EMBEDDING, (40, 0), (0, 32), dtype=torch.bfloat16).shape == (0, 32)
    assert tensors.num_bytes_read == 20 * 28 * 4 + 3 * 4


def test_fused_experts_are_read_one_by_one(mixture_policy: Path, tmp_path: Path):
    config, stored = config_of(mixture_policy), load_file(mixture_policy / WEIGHTS_FILE)
    fused = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([stored[f"{prefix}{e}.{part}_proj.weight"] for e in range(4)])
            for part in ("gate", "up", "down")
        )
        fused[prefix + "gate_up_proj"], fused[prefix + "down_proj"] = torch.cat((gate, up), dim=1), down
    save_file(fused, tmp_path / WEIGHTS_FILE)

    tensors = PolicyTensors(tmp_path, config)

    for name, tensor in stored.items():
        found = tensors.read(name, (0,) * tensor.ndim, tuple(tensor.shape), dtype=torch.float32)
        assert torch.equal(found, tensor), name
    before = tensors.num_bytes_read
    assert torch.equal(tensors.read(UP, (5, 3), (7, 11), dtype=torch.float32), stored[UP][5:12, 3:14])
    assert tensors.num_bytes_read - before == 7 * 11 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_numbers_become_what_is_asked_for(tied_policy: Path, tmp_path: Path, dtype: torch.dtype):
    stored = {name: tensor.to(dtype) for name, tensor in load_file(tied_policy / WEIGHTS_FILE).items()}
    save_file(stored, tmp_path / WEIGHTS_FILE)

    found = dict(PolicyTensors(tmp_path, config_of(tied_policy)).whole(torch.float32))

    assert stored
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in stored.items())


def test_missing_and_misshaped_tensors_are_named(tied_policy: Path, tmp_path: Path):
    config, stored = config_of(tied_policy), load_file(tied_policy / WEIGHTS_FILE)
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({n: t for n, t in stored.items() if n != "model.norm.weight"}, r"no tensor 'model\.norm\.weight'.*\[32\]"),
        (
            {**stored, EMBEDDING: torch.zeros(41, 32)},
            r"model\.safetensors.*must have shape \[40, 32\]; found \[41, 32\]",
        ),
        ({**stored, EMBEDDING: stored[EMBEDDING].double()}, "must be stored as one of F32, BF16, F16; found F64"),
    ]
    for tensors, message in cases:
        save_file(tensors, tmp_path / WEIGHTS_FILE)
        with pytest.raises(DataError, match=message):
            PolicyTensors(tmp_path, config)


def test_a_tensor_may_be_optional(untied_policy: Path, tmp_path: Path):
    stored = load_file(untied_policy / WEIGHTS_FILE)
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / WEIGHTS_FILE)

    tensors = PolicyTensors(tmp_path, config_of(untied_policy), optional=frozenset({"lm_head.weight"}))

    assert "lm_head.weight" not in tensors
    assert EMBEDDING in tensors
    with pytest.raises(DataError, match=r"no tensor 'lm_head\.weight'"):
        tensors.read("lm_head.weight", (0, 0), (1, 1), dtype=torch.float32)


def test_rectangles_that_reach_beyond_a_tensor_are_refused(tied_policy: Path):
    tensors = PolicyTensors(tied_policy, config_of(tied_policy))

    with pytest.raises(DataError, match=r"must have a size of at least \[41, 32\]; found shape \[40, 32\]"):
        tensors.read(EMBEDDING, (1, 0), (40, 32), dtype=torch.float32)


def test_torn_and_missing_files_are_named(tied_policy: Path, tmp_path: Path):
    config, stored = config_of(tied_policy), load_file(tied_policy / WEIGHTS_FILE)
    with pytest.raises(DataError, match=r"neither model\.safetensors nor"):
        PolicyTensors(tmp_path, config)
    content = (tied_policy / WEIGHTS_FILE).read_bytes()
    for cut in (0, 4, 100, len(content) - 1):
        (tmp_path / WEIGHTS_FILE).write_bytes(content[:cut])
        with pytest.raises(DataError, match=r"model\.safetensors is truncated or not a safetensors file"):
            PolicyTensors(tmp_path, config)
    folder = save_shards(tmp_path / "shards", halves(stored))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"model-00002-of-00002\.safetensors does not exist"):
        PolicyTensors(folder, config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ('{"weight_map": 3}', "is not an index"),
        ('{"weight_map": {}}', "must name safetensors files of its own folder"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "must name safetensors files of its own folder"),
        ('{"weight_map": {"a": "/etc/model.safetensors"}}', "must name safetensors files of its own folder"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "must name safetensors files of its own folder"),
    ],
)
def test_an_index_that_is_none_is_refused(tied_policy: Path, tmp_path: Path, content: str, message: str):
    (tmp_path / INDEX_FILE).write_text(content)

    with pytest.raises(DataError, match=message):
        PolicyTensors(tmp_path, config_of(tied_policy))


def test_an_index_that_promises_what_is_not_there_is_refused(tied_policy: Path, tmp_path: Path):
    shards = halves(load_file(tied_policy / WEIGHTS_FILE))
    first, second = shards
    name = next(iter(shards[first]))

    with pytest.raises(DataError, match=f"{second} has no tensor '{name}', although"):
        PolicyTensors(save_shards(tmp_path, shards, **{name: second}), config_of(tied_policy))


def test_tensors_that_nobody_needs_are_mentioned(tied_policy: Path, tmp_path: Path):
    stored = load_file(tied_policy / WEIGHTS_FILE)
    save_file(
        {**stored, "model.vision.weight": torch.zeros(2), "lm_head.weight": stored[EMBEDDING].clone()},
        tmp_path / WEIGHTS_FILE,
    )

    with structlog.testing.capture_logs() as logs:
        dict(PolicyTensors(tmp_path, config_of(tied_policy)).whole(torch.float32))

    assert [(log["event"], log["num_tensors"], log["first"]) for log in logs] == [
        ("tensors_ignored", 1, "model.vision.weight")
    ]


@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_a_tied_tensor_with_other_values_is_refused(tied_policy: Path, tmp_path: Path, backend: Any):
    stored, other = load_file(tied_policy / WEIGHTS_FILE), torch.ones(40, 32)
    config = parse_policy_config(read_policy_config(tied_policy), backend=backend)
    for tensor in (other, other[:39], other.bfloat16()):
        save_file({**stored, "lm_head.weight": tensor}, tmp_path / WEIGHTS_FILE)
        with pytest.raises(DataError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight', although"):
            PolicyTensors(tmp_path, config)


def test_tensors_that_a_class_does_not_know_are_refused_unless_it_ignores_them(tied_policy: Path, tmp_path: Path):
    config_json = read_policy_config(tied_policy) | {"num_nextn_predict_layers": 1}
    stored = load_file(tied_policy / WEIGHTS_FILE)
    layers = config_json["num_hidden_layers"]
    config = parse_policy_config(config_json, backend="transformers")
    left_out = [f"model.layers.{layers}.eh_proj.weight", "mtp.norm.weight"]
    left_out += ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    for extra in left_out:
        save_file({**stored, extra: torch.zeros(2)}, tmp_path / WEIGHTS_FILE)
        assert refusal(PolicyTensors, tmp_path, config) is None
    unknown = f"model.layers.{layers + 1}.x.weight"
    save_file({**stored, unknown: torch.zeros(2)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(DataError, match=rf"'{unknown}' is not part of Qwen3ForCausalLM \(1 such"):
        PolicyTensors(tmp_path, config)


def test_a_padded_vocabulary_needs_its_size_in_the_configuration(tied_policy: Path, tmp_path: Path):
    config_json, stored = read_policy_config(tied_policy), load_file(tied_policy / WEIGHTS_FILE)
    save_file({**stored, EMBEDDING: torch.zeros(64, 32)}, tmp_path / WEIGHTS_FILE)
    for backend in ("megatron", "transformers"):
        with pytest.raises(
            DataError, match=r"'model\.embed_tokens\.weight' must have shape \[40, 32\]; found \[64, 32\]"
        ):
            PolicyTensors(tmp_path, parse_policy_config(config_json, backend=backend))  # type: ignore[arg-type]
        PolicyTensors(tmp_path, parse_policy_config(config_json | {"vocab_size": 64}, backend=backend))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_quantized_weights_are_refused_by_field(tied_policy: Path, tmp_path: Path, field: str):
    content = read_policy_config(tied_policy) | {field: {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(content))

    with pytest.raises(SettingsError, match=rf"config\.json has {field}, and quantized weights cannot be trained.*fp8"):
        open_policy(tmp_path)


def test_a_policy_is_opened_from_a_folder_its_name_or_its_configuration(tied_policy: Path):
    content = read_policy_config(tied_policy)
    for policy, folder in ((tied_policy, tied_policy), (str(tied_policy), tied_policy), (content, None)):
        opened = open_policy(policy)
        assert (opened.policy_dir, opened.config_json) == (folder, content)
        assert not opened.config.trains_vision
        assert open_policy(policy, trains_vision=True).config.trains_vision
    classifier = {**content, "architectures": ["Qwen3ForTokenClassification"]}
    assert open_policy(classifier, is_critic=True).config.architecture == "Qwen3ForCausalLM"
    with pytest.raises(SettingsError, match="Qwen3ForTokenClassification"):
        open_policy(classifier)


def test_a_folder_keeps_configuration_and_tokenizer(tied_policy: Path, tmp_path: Path):
    config = {**read_policy_config(tied_policy), "torch_dtype": "float32", "own_field": [1, 2]}
    tensors = dict(PolicyTensors(tied_policy, config_of(tied_policy)).whole(torch.bfloat16))

    write_policy_folder(tmp_path / "new", config, tensors, source_dir=tied_policy)

    written = read_policy_config(tmp_path / "new")
    del config["torch_dtype"]
    assert written == {**config, "dtype": "bfloat16"}
    assert (tmp_path / "new" / "tokenizer_config.json").read_text() == '{"made": "for a test"}'
    assert not (tmp_path / "new" / INDEX_FILE).exists()
    found = load_file(tmp_path / "new" / WEIGHTS_FILE)
    assert different_tensors(found, tensors) == []


def test_shards_are_as_large_as_allowed_and_tensors_are_taken_one_by_one(tmp_path: Path):
    buffer = torch.empty(10)

    def stream() -> Any:
        for index in range(5):  # the same buffer is reused for each tensor
            yield f"t{index}", buffer.fill_(index)
        yield "large", torch.ones(100)

    write_policy_folder(tmp_path, {}, stream(), source_dir=None, max_shard_bytes=90)

    index = json.loads((tmp_path / INDEX_FILE).read_text())
    names = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert index["metadata"]["total_size"] == 5 * 40 + 400
    assert index["weight_map"] == {
        "t0": names[0], "t1": names[0], "t2": names[1], "t3": names[1], "t4": names[2], "large": names[3]
    }  # fmt: skip
    assert [load_file(tmp_path / index["weight_map"][f"t{i}"])[f"t{i}"].unique().tolist() for i in range(5)] == [
        [float(i)] for i in range(5)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", *names, INDEX_FILE]


def test_what_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="there are no tensors to write"):
        write_policy_folder(tmp_path, {}, {}, source_dir=None)
    with pytest.raises(DataError, match="tensor 'a' occurs twice"):
        write_policy_folder(tmp_path, {}, [("a", torch.ones(1))] * 2, source_dir=None)
    write_policy_folder(tmp_path, {}, {"a": torch.ones(1)}, source_dir=None)
    with pytest.raises(DataError, match="already has weights; choose a new folder"):
        write_policy_folder(tmp_path, {}, {"a": torch.ones(1)}, source_dir=None)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_are_as_readable_as_the_umask_says(tmp_path: Path, umask: int, mode: int):
    before = os.umask(umask)
    try:
        write_policy_folder(tmp_path / "policy", {}, {"weight": torch.zeros(2)}, source_dir=None)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "policy").iterdir()} == {mode}
