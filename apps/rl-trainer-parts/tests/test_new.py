"""`new`: the folder for a new run."""

import json
from pathlib import Path

import numpy as np
import pytest
from invented_inputs import TINY_SIZES

from rl_async_trainer.settings import AsyncSettings
from rl_core.errors import SettingsError
from rl_rollout.rewards import RewardInput, resolve_reward
from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.checks.model_folder import missing_path
from rl_trainer_parts.commands.new import new, starter_values
from rl_trainer_parts.settings.fields import setting_fields
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import load_settings

FILES = ["reward.py", "settings.toml", "train.jsonl", "validation.jsonl"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_model(folder: Path, *, positions: int, template: str | None = None) -> Path:
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], **TINY_SIZES, "max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize("kind", [Settings, AsyncSettings])
def test_settings_are_valid_and_explained_by_their_own_docstrings(kind: type[Settings]) -> None:
    assert new(["my run"], kind, program="rl-x-trainer") == 0
    assert sorted(path.name for path in Path("my run").iterdir()) == FILES
    text = Path("my run/settings.toml").read_text()
    settings = load_settings(Path("my run/settings.toml"), kind=kind)
    fields = setting_fields(kind)
    values = {name: value for name, value in starter_values(Path("my run"), None).items() if name in fields}
    assert ("schedule.max_staleness" in values) == (kind is AsyncSettings)
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    for name, value in values.items():
        section, _, key = name.partition(".")
        assert getattr(getattr(settings, section), key) == value
        assert fields[name].meaning in comments
    assert "`rl-x-trainer train --help`" in comments


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/first", "first-run"), ("first", "first"), ("runs/a/first", "first")]
)
def test_the_run_has_another_folder_than_its_settings(folder: str, name: str) -> None:
    new([folder], Settings, program="rl-sync-trainer")
    settings = load_settings(Path(folder, "settings.toml"))
    assert settings.run.name == name
    assert not settings.run_folder.exists()


def test_the_first_error_is_the_model_alone() -> None:
    new(["mine"], Settings, program="rl-sync-trainer")
    with pytest.raises(SettingsError) as refused:
        check_settings(load_settings(Path("mine/settings.toml")))
    (line,) = str(refused.value).splitlines()
    assert line.startswith("policy.path: models/Qwen2.5-0.5B-Instruct does not exist (looked in ")
    assert "`hf download OWNER/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct`" in line


def test_a_path_that_exists_beside_or_above_the_settings(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new(["mine"], Settings, program="rl-sync-trainer")
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    settings = load_settings(Path("../mine/settings.toml"), ["--prompts.validation=train.jsonl"])
    with pytest.raises(SettingsError) as refused:
        check_settings(settings)
    train, validation, *_ = str(refused.value).splitlines()
    assert train.endswith(f"It exists in {here}: run the command in that folder.")
    assert validation.endswith(f"It exists in {here / 'mine'}: run the command in that folder.")


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_a_missing_file_is_no_id_of_the_hub(ending: str) -> None:
    for path in (f"mine/train.{ending}", f"datasets/train.{ending}"):
        problem = missing_path(Path(path), setting="prompts.train", kind="dataset")
        assert problem == f"prompts.train: {path} does not exist (looked in {Path.cwd()})."
    assert "hf download" in missing_path(Path("openai/gsm8k"), setting="prompts.train", kind="dataset")


def test_what_it_prints_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    new(["my run"], Settings, program="rl-sync-trainer")
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct",
        "      (or set policy.path in 'my run/settings.toml' to the folder of another model)",
        "  rl-sync-trainer check-machine 'my run/settings.toml'",
        "  rl-sync-trainer train 'my run/settings.toml' --dry-run",
        "  rl-sync-trainer train 'my run/settings.toml'",
    ]


@pytest.mark.parametrize(("positions", "expected"), [(64, (16, 48)), (256, (64, 192)), (4096, (512, 256))])
def test_lengths_fit_the_model(positions: int, expected: tuple[int, int]) -> None:
    model = make_model(Path("model"), positions=positions, template="{{ messages }}")
    values = starter_values(Path("mine"), model)
    assert (values["prompts.max_tokens"], values["rollout.max_response_tokens"]) == expected
    assert (values["policy.path"], values["prompts.plain_prompts"]) == (model, "chat")


def test_lengths_fit_the_learner() -> None:
    """GPT-2 names its positions otherwise, and the angles of longrope are the same up to the original length."""
    model = make_model(Path("model"), positions=4096)
    sizes = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 1}
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 64, **sizes}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    widths = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    widths["original_max_position_embeddings"] = 64
    phi3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_parameters": rope, **sizes, **widths}
    for config in (gpt2, phi3):
        (model / "config.json").write_text(json.dumps(config))
        values = starter_values(Path("mine"), model)
        assert (values["prompts.max_tokens"], values["rollout.max_response_tokens"]) == (16, 48)


def test_a_model_without_a_chat_template_gets_the_text_as_it_stands() -> None:
    model = make_model(Path("model"), positions=512)
    assert starter_values(Path("mine"), model)["prompts.plain_prompts"] == "raw"
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert starter_values(Path("mine"), model)["prompts.plain_prompts"] == "chat"


def test_nothing_that_is_there_is_written_over(here: Path) -> None:
    (here / "full").mkdir()
    (here / "full/train.jsonl").write_text("mine")
    (here / "file").write_text("mine")
    words = "full must be a new or empty folder; found train.jsonl in it. Choose another folder."
    for folder, says in (("full", words), ("file", "file cannot be written"), ("file/in", "file/in cannot be written")):
        with pytest.raises(SettingsError) as refused:
            new([folder], Settings, program="rl-sync-trainer")
        assert str(refused.value).startswith(says)
    assert [path.name for path in (here / "full").iterdir()] == ["train.jsonl"]
    with pytest.raises(SettingsError, match="--model: nowhere does not exist"):
        new(["other", "--model", "nowhere"], Settings, program="rl-sync-trainer")
    assert not (here / "other").exists()


def test_the_reward_takes_the_last_number() -> None:
    new(["mine"], Settings, program="rl-sync-trainer")
    reward = resolve_reward("mine/reward.py:reward")
    rows = [json.loads(line) for name in FILES[2:] for line in (Path("mine") / name).read_text().splitlines()]
    assert len(rows) == 10

    def scored(text: str, answer: str) -> float:
        ids = np.zeros(1, dtype=np.int32)
        given = RewardInput(prompt_uid="p", response_text=text, response_ids=ids, ground_truth=answer)
        return float(reward(given))

    for row in rows:
        left, right = map(int, row["prompt"].split("+"))
        assert row["answer"] == str(left + right)
        assert scored(f"{left} and {right} make {left + right}.", row["answer"]) == 1.0
        assert scored(f"{left + right}, or {left}", row["answer"]) == 0.0
    assert scored("no number", "1") == 0.0
