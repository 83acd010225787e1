"""The Hugging Face folder that a path refers to, and its export."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.errors import CheckpointError, SettingsError
from rl_distill.architecture.policy_config import parse_policy_config
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.background import PendingSave
from rl_distill.checkpoints.checkpoint import TrainedAdapter, fingerprint_tensors
from rl_distill.checkpoints.hf_folder import write_policy_folder
from rl_distill.checkpoints.peft_folder import write_adapter
from rl_distill.checkpoints.store import CheckpointStore
from rl_distill.options import LoraOptions
from rl_sync_trainer.main import main
from rl_trainer_parts.commands.policies import export_policy, find_policy, opened_policy

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with checkpoints of steps 3 and 12."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=5)
    for step in (3, 12):

        def write_learner(folder: Path, step: int = step) -> PendingSave:
            (folder / "policy").mkdir()
            (folder / "policy" / "config.json").write_text("{}")
            (folder / "policy" / "model.safetensors").write_text(f"weights of step {step}")
            return PendingSave()

        store.begin(step, {"step": step}, write_learner)
    store.close()
    return tmp_path / "run"


def test_a_run_stands_for_its_newest_checkpoint(run: Path) -> None:
    newest = run / "checkpoints" / "step_12"
    assert find_policy(run) == find_policy(newest) == find_policy(newest / "policy") == newest / "policy"
    assert find_policy(run / "checkpoints" / "step_3") == run / "checkpoints" / "step_3" / "policy"


def test_a_run_of_another_format_is_refused_and_its_policy_opens(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "settings.toml").write_text("")
    for path in (run, run / "checkpoints" / "step_3"):
        with pytest.raises(SettingsError, match=r"is a run in format 1, .* reads format 4. Use version 0.1"):
            find_policy(path)
    monkeypatch.chdir(run / "checkpoints")
    with pytest.raises(SettingsError, match="is a run in format 1"):
        find_policy(Path("step_3"))
    exported = run / "checkpoints" / "step_12" / "policy"
    assert find_policy(exported) == exported
    (run / "format").write_text("4\n")
    assert find_policy(run) == exported


def test_paths_that_stand_for_no_policy(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SettingsError, match="has no checkpoint yet"):
        find_policy(tmp_path / "new")
    with pytest.raises(SettingsError, match="nowhere does not exist"):
        find_policy(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="is neither a Hugging Face folder"):
        find_policy(tmp_path)
    (tmp_path / "settings.toml").touch()  # as `new` writes it
    with pytest.raises(SettingsError, match="is neither a Hugging Face folder"):
        find_policy(tmp_path)


@pytest.fixture
def adapter_run(tmp_path: Path) -> Path:
    """Return a run folder with a checkpoint of an adapter, and its base beside it."""
    base, module = tmp_path / "base", "model.layers.0.self_attn.q_proj"
    shapes = tensor_shapes(parse_policy_config(CONFIG))
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    write_policy_folder(base, CONFIG, weights, source_dir=None)
    trained = TrainedAdapter(
        options=LoraOptions(rank=2, alpha=4),
        modules=(module,),
        base=base,
        base_digest=fingerprint_tensors(weights.items()),
    )

    def write_learner(folder: Path) -> PendingSave:
        tensors = {f"{module}.lora_A.weight": torch.ones(2, 8), f"{module}.lora_B.weight": torch.ones(8, 2)}
        said = {"base": base, "base_digest": ("float32", trained.base_digest)}
        write_adapter(folder / "adapter", tensors, options=trained.options, matrices=shapes, **said)
        header = {"options": {"dtype": "float32"}, "adapter": trained.record()}
        (folder / "learner.json").write_text(json.dumps(header))
        return PendingSave()

    store = CheckpointStore(tmp_path / "adapter-run" / "checkpoints", keep=5)
    store.begin(7, {"step": 7}, write_learner)
    store.close()
    return tmp_path / "adapter-run"


def is_merged(folder: Path) -> bool:
    """Return True if only the adapted matrix differs from the base of zeros, by the product of an adapter of ones."""
    weights = load_file(folder / "model.safetensors")
    sums = {name: float(tensor.sum()) for name, tensor in weights.items() if tensor.any()}
    return sums == {"model.layers.0.self_attn.q_proj.weight": 2.0 * 2 * 64} and (folder / "config.json").is_file()


def test_an_adapter_is_exported_merged_or_alone(
    adapter_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = adapter_run / "checkpoints" / "step_7" / "adapter"
    assert find_policy(adapter_run) == find_policy(adapter.parent) == find_policy(adapter) == adapter
    for number, words in enumerate(([], ["--merge"], ["--merge", "--base", str(tmp_path / "base")])):
        assert main(["export", str(adapter_run), str(tmp_path / f"merged-{number}"), *words]) == 0
        assert is_merged(tmp_path / f"merged-{number}")
    assert main(["export", "--adapter", str(adapter_run), str(tmp_path / "alone")]) == 0
    assert f"exported {adapter} to " in capsys.readouterr().out
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "alone" / name).read_bytes() == (adapter / name).read_bytes()


def test_a_base_that_was_moved_or_changed_is_told(
    adapter_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").rename(tmp_path / "moved")
    words = ["export", str(adapter_run), str(tmp_path / "merged")]
    assert main(words) == 2
    assert "Pass the folder of that model as `base` (`export --base FOLDER`)" in capsys.readouterr().err
    assert main([*words, "--base", str(tmp_path / "moved")]) == 0
    shutil.rmtree(tmp_path / "merged")
    weights = load_file(tmp_path / "moved" / "model.safetensors")
    weights["model.norm.weight"][0] = 1e-30
    save_file(weights, tmp_path / "moved" / "model.safetensors")
    assert main([*words, "--base", str(tmp_path / "moved")]) == 2
    assert "has different weights from the base model of" in capsys.readouterr().err
    assert not list(tmp_path.glob("*merged*"))


def test_options_of_export_that_do_not_fit(
    run: Path, adapter_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "exported")
    for option in (["--adapter"], ["--merge"], ["--base", str(tmp_path)]):
        assert main(["export", str(run), target, *option]) == 2
        assert f"has no adapter, because all weights were trained. Leave out {option[0]}." in capsys.readouterr().err
    assert main(["export", str(adapter_run), target, "--adapter", "--merge"]) == 2
    assert "accepts either --adapter, to write the adapter alone, or --merge" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="exists and is not empty"):
        export_policy(adapter_run, tmp_path, adapter_alone=True)


def test_an_adapter_is_opened_merged_for_a_while(run: Path, adapter_run: Path) -> None:
    with opened_policy(run) as folder:
        assert folder == run / "checkpoints" / "step_12" / "policy"
    with opened_policy(adapter_run) as folder:
        assert is_merged(folder)
    assert not folder.exists()


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    os.truncate(run / "checkpoints" / "step_12" / "policy" / "model.safetensors", 3)
    with pytest.raises(CheckpointError, match="is torn"):
        export_policy(run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_export_copies_the_policy(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "deep" / "exported", tmp_path / "empty"):
        assert export_policy(run, target) == run / "checkpoints" / "step_12" / "policy"
        assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
        assert (target / "model.safetensors").read_text() == "weights of step 12"


def test_export_never_overwrites(run: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    for target in (tmp_path / "taken", tmp_path / "taken" / "mine"):
        with pytest.raises(SettingsError, match="exists and is not empty"):
            export_policy(run, target)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine"]


def test_export_command_copies_a_policy_or_says_why_not(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run / "checkpoints" / "step_3"), str(tmp_path / "exported")]) == 0
    assert "exported" in capsys.readouterr().out
    assert (tmp_path / "exported" / "model.safetensors").read_text() == "weights of step 3"
    assert main(["export", str(run), str(tmp_path / "exported")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    os.truncate(run / "checkpoints" / "step_12" / "manifest.json", 3)
    assert main(["export", str(run), str(tmp_path / "other")]) == 1
