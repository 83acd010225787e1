"""What of a policy's folder is carried into exports: everything that is not weights, byte for byte."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM

from rl_distill.architecture.policy_config import ModelBackend, read_policy_config
from rl_distill.checkpoints import companion_files
from rl_distill.checkpoints.companion_files import config_bytes, copy_companions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.options import LearnerOptions

CARRIED = {
    "tokenizer_config.json": b'{"made":  "for a test"}\r\n',
    "generation_config.json": b'{ "temperature": 0.7 , "custom": null}',
    "chat_template.jinja": b"{{ messages }}\xff",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "preprocessor_config.json": b"{}",
    "tokenizer.model": bytes(range(256)),
    "modeling_own.py": b"raise SystemExit('this must not run')\n",
    "assets/deep/er/notes.txt": b"",
    "docs.index.json": b"[]",
    "table.npz": b"PK",
    "name with\nnew lines é.txt": b"odd",
}
LEFT_OUT = ("pytorch_model.bin", "pytorch_model.bin.index.json", "original/consolidated.00.pth", "adapter_config.json")
HIDDEN = (".git/config", ".cache/huggingface/x.metadata", ".gitattributes")


def write_files(folder: Path, names: dict[str, bytes]) -> None:
    for name, content in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def add_companions(policy_dir: Path) -> bytes:
    """Add files and fields to a model's folder; return its config.json."""
    write_files(policy_dir, CARRIED | dict.fromkeys((*LEFT_OUT, *HIDDEN), b"{}"))
    own = {"own_field": {"dtype": "int8", "x": [1.0, 2e-5]}, "auto_map": {"AutoConfig": "modeling_own.Own"}}
    text = json.dumps(own | read_policy_config(policy_dir), indent=1).replace(": ", " :  ") + "\n\n"
    (policy_dir / "config.json").write_text(text)
    return text.encode()


@pytest.mark.parametrize("backend", ["megatron", "transformers"])
def test_a_checkpoint_has_all_files_and_fields(tied_policy: Path, tmp_path: Path, backend: ModelBackend):
    folder = shutil.copytree(tied_policy, tmp_path / "source")
    config = add_companions(folder)
    learner = MegatronLearner(folder, LearnerOptions(dtype="float32"), backend=backend)
    learner.save(tmp_path / "saved")
    learner.close()

    found = files_of(tmp_path / "saved" / "policy")

    assert found.pop("config.json") == config
    assert "model.safetensors" in found
    assert {name: found.get(name) for name in CARRIED} == CARRIED
    assert not {*LEFT_OUT, *HIDDEN} & found.keys()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "policy", trust_remote_code=False)
    assert opened.config.own_field["x"] == [1.0, 2e-5]
    assert opened.dtype == torch.float32


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_only_the_dtype_of_other_weights_changes(tmp_path: Path, field: str):
    raw = (
        b'{"hidden_size":8,\t"%b" : "bfloat16", "rope":{"x":1e9},"text_config": {"dtype":"float16"}}\n' % field.encode()
    )
    (tmp_path / "config.json").write_bytes(raw)
    config = json.loads(raw)

    assert config_bytes(config, dtype="float32", source=tmp_path) == raw.replace(b"bfloat16", b"float32").replace(
        b"float16", b"float32"
    )
    plain = b'{"a" :1}'
    (tmp_path / "config.json").write_bytes(plain)
    assert config_bytes({"a": 1}, dtype="float32", source=tmp_path) == plain
    changed = json.loads(config_bytes({"a": 2, "torch_dtype": "bfloat16"}, dtype="float32", source=tmp_path))
    assert changed == {"a": 2, "dtype": "float32"}
    nested = b'{"dtype":"bfloat16","own":{"dtype":"bfloat16"}}'
    (tmp_path / "config.json").write_bytes(nested)
    found = json.loads(config_bytes(json.loads(nested), dtype="float32", source=tmp_path))
    assert found == {"dtype": "float32", "own": {"dtype": "bfloat16"}}


def test_what_leads_out_of_the_folder_or_is_too_large_is_left_out(tmp_path: Path):
    source, target, other = tmp_path / "source", tmp_path / "source" / "runs" / "policy", tmp_path / "other"
    for folder in (source, target, other):
        folder.mkdir(parents=True, exist_ok=True)
    write_files(source, {"kept.txt": b"1", "runs/old.txt": b"2"})
    write_files(other, {"tokenizer.json": b"3", "secret": b"4", "vocab.json": b"5"})
    (source / "passwd").symlink_to("/etc/passwd")
    (source / "chat_template.jinja").symlink_to(other / "secret")
    (source / "tokenizer.json").symlink_to(other / "tokenizer.json")
    (source / "inside.txt").symlink_to("kept.txt")
    (source / "folder").symlink_to("/etc")
    (source / "loop").symlink_to("loop")
    (source / "nested").mkdir()
    (source / "nested" / "vocab.json").symlink_to(other / "vocab.json")
    os.mkfifo(source / "pipe")
    with (source / "sparse.dat").open("wb") as stream:
        stream.truncate(2 << 30)
    (source / os.fsdecode(b"bad\xff.txt")).touch()
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(source / "socket"))
    companion_files._warn.cache_clear()

    with structlog.testing.capture_logs() as logs:
        copy_companions(source, target)
        copy_companions(source, target)

    bound.close()
    assert files_of(target) == {"kept.txt": b"1", "tokenizer.json": b"3", "inside.txt": b"1"}
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert [(log["event"], log["num_files"]) for log in logs] == [("files_left_out", 8)]


def test_files_of_the_hugging_face_cache_are_copied(tmp_path: Path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    write_files(tmp_path / "models--a--b" / "blobs", {"ab": b"{}", "cd": b"template"})
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (snapshot / "merges.txt").symlink_to("../../blobs/ab")
    (snapshot / "additional_chat_templates" / "x.jinja").symlink_to("../../../blobs/cd")
    (tmp_path / "new").mkdir()

    copy_companions(snapshot, tmp_path / "new")

    assert files_of(tmp_path / "new") == {"merges.txt": b"{}", "additional_chat_templates/x.jinja": b"template"}


def test_folders_without_end_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(companion_files, "MAX_FILES", 3)
    monkeypatch.setattr(companion_files, "MAX_FOLDER_BYTES", 5)
    write_files(tmp_path / "source", {f"{name}.txt": b"12" for name in "abcd"} | {"x/y.txt": b""})
    (tmp_path / "new").mkdir()

    copy_companions(tmp_path / "source", tmp_path / "new")

    assert sorted(files_of(tmp_path / "new")) == ["a.txt", "b.txt"]
