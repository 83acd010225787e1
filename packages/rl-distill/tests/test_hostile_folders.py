"""Hostile model folders and checkpoints: sizes are bounded before any allocation, and errors name the file."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from rl_core.errors import CheckpointError, DataError, RLError
from rl_core.files import read_safetensors_header
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.checkpoints.hf_folder import PolicyTensors
from rl_distill.checkpoints.store import CheckpointStore, verify_checkpoint
from rl_distill.teacher.model_folder import model_fingerprint, model_traits

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10_000_000},
        {"num_hidden_layers": 1e999},
        {"num_hidden_layers": 2.5},
        {"num_hidden_layers": True},
        {"head_dim": float("inf")},
        {"head_dim": -4},
        {"head_dim": "4"},
        {"hidden_size": 10**30},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": float("inf")},
        {"rope_theta": 10**400},
        {"architectures": {"a": 1}},
        {"architectures": 5},
        {"architectures": [["Qwen3ForCausalLM"]]},
        {"architectures": [{}]},
        {"architectures": True},
        {"layer_types": 5},
        {"layer_types": [[]]},
        {"layer_types": ["b", 1]},
        {"rope_scaling": {"rope_type": ["x"]}},
        {"rope_scaling": {"rope_type": "linear", "factor": float("inf")}},
        {"rope_scaling": {"partial_rotary_factor": ["x"]}},
        {**MIXTURE, "num_experts": 100_000_000},
        {**MIXTURE, "num_experts": float("inf")},
        {**MIXTURE, "decoder_sparse_step": float("inf")},
        {**MIXTURE, "mlp_only_layers": [[]]},
        {**MIXTURE, "mlp_only_layers": 5},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused(change):
    with pytest.raises(RLError):
        parse_policy_config({**DENSE, **change})


@pytest.mark.parametrize("content", ["[" * 200_000, "[1]", '{"a": ' + "9" * 5000 + "}", "{" + '"a": [[],' * 3])
def test_a_configuration_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match=r"config\.json"):
        read_policy_config(tmp_path)
    with pytest.raises(RLError, match=r"config\.json"):
        model_traits(tmp_path)


def test_fused_experts_without_bytes_are_not_counted_out(tmp_path):
    config = parse_policy_config({**DENSE, **MIXTURE})
    save_file(
        {"model.layers.0.mlp.experts.gate_up_proj": torch.empty(100_000_000, 0, 8)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(DataError, match=r"must have 4 experts; found 100000000"):
        PolicyTensors(tmp_path, config)


def header(**tensor):
    raw = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **tensor}}).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (6).to_bytes(8, "little") + b'{"a":1}',
        (400_000).to_bytes(8, "little") + b"[" * 400_000,
        header(dtype="F99"),
        header(dtype=[]),
        header(shape=[1e999]),
        header(shape=[-2, -1]),
        header(shape=[1 << 62, 1 << 62]),
        header(data_offsets=[0, 16]),
        header(data_offsets=[-8, 0]),
        header(data_offsets=[0.5, 8]),
        header(data_offsets=5),
    ],
    ids=range(14),
)
def test_a_header_that_cannot_be_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with pytest.raises(DataError, match=r"model\.safetensors"):
        read_safetensors_header(tmp_path / "model.safetensors")
    with pytest.raises(RLError):
        PolicyTensors(tmp_path, parse_policy_config(DENSE))
    with pytest.raises(RLError):
        model_fingerprint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_pipes_in_a_model_folder_are_refused_at_once(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(RLError, match="must be a regular file"):
        PolicyTensors(tmp_path, parse_policy_config(read_policy_config(tmp_path)))


def test_a_file_in_place_of_the_checkpoints_is_an_error_of_ours(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="checkpoints"):
        CheckpointStore(tmp_path / "checkpoints", keep=1).begin(1, {}, lambda _: None)


@pytest.mark.parametrize("value", ["2.5", '"5"', "true", "null", "[]"])
@pytest.mark.parametrize("field", ["size_bytes", "crc32c"])
def test_a_manifest_with_what_is_no_number_is_refused(tmp_path, field, value):
    fields = {"size_bytes": "5", "crc32c": "5"} | {field: value}
    record = ", ".join(f'"{name}": {text}' for name, text in fields.items())
    (tmp_path / "manifest.json").write_text(f'{{"format": 1, "files": {{"trainer.json": {{{record}}}}}}}')
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        verify_checkpoint(tmp_path)
