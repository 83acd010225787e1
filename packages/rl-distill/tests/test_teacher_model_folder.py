"""Fingerprints of teachers: equal for a copy, different for other weights."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file

from rl_core.errors import SettingsError
from rl_distill.teacher.model_folder import model_fingerprint


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(64, 64, generator=generator) for name in ("embed", "layer.0", "layer.1", "norm")}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    save_file(tensors(), folder / "model.safetensors")
    return folder


def test_a_copy_and_other_shards_are_the_same_teacher(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    first = model_fingerprint(model)
    assert model_fingerprint(tmp_path / "copy") == first
    (tmp_path / "copy" / "model.safetensors").unlink()
    items = list(tensors().items())
    save_file(dict(items[:2]), tmp_path / "copy" / "model-00001-of-00002.safetensors")
    save_file(dict(items[2:]), tmp_path / "copy" / "model-00002-of-00002.safetensors")
    assert model_fingerprint(tmp_path / "copy") == first


def test_a_folder_of_links_is_the_same_teacher(model, tmp_path):
    (tmp_path / "links").mkdir()
    for file in model.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    assert model_fingerprint(tmp_path / "links") == model_fingerprint(model)


def test_what_is_beside_the_weights_does_not_count(model):
    first = model_fingerprint(model)
    (model / "README.md").write_text("a model")
    assert model_fingerprint(model) == first


@pytest.mark.parametrize("place", [(0, 0), (32, 0), (63, 63)])
def test_other_weights_are_another_teacher(model, place):
    first = model_fingerprint(model)
    changed = tensors()
    changed["layer.1"][place] += 1e-3
    save_file(changed, model / "model.safetensors")
    assert model_fingerprint(model) != first


@pytest.mark.parametrize("name", ["config", "renamed", "reshaped", "missing"])
def test_another_form_is_another_teacher(model, name):
    first = model_fingerprint(model)
    changed = tensors()
    if name == "config":
        (model / "config.json").write_text('{"hidden_size": 32}')
    elif name == "renamed":
        changed["layer.2"] = changed.pop("layer.1")
    elif name == "reshaped":
        changed["layer.1"] = changed["layer.1"].reshape(32, 128)
    else:
        del changed["layer.1"]
    save_file(changed, model / "model.safetensors")
    assert model_fingerprint(model) != first


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 37) + json.dumps({"a": {"data_offsets": [0, 1 << 50]}}).encode().ljust(37),
        struct.pack("<Q", 40) + json.dumps({"a": {"data_offsets": [-9, 4]}}).encode().ljust(40) + b"1234",
    ],
    ids=len,
)
def test_torn_weights_are_refused(model, raw):
    (model / "model.safetensors").write_bytes(raw)
    with pytest.raises(SettingsError, match="must be a model folder with config"):
        model_fingerprint(model)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(model, missing):
    (model / missing).unlink()
    with pytest.raises(SettingsError, match="must be a model folder"):
        model_fingerprint(model)
