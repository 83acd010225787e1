"""Where settings come from, which wins, and that each is explained."""

import math
from pathlib import Path

import pytest

from rl_core.errors import SettingsError
from rl_sync_trainer.help_text import help_text
from rl_sync_trainer.settings import Settings
from rl_sync_trainer.sources import attribute_meanings, load_settings, parse_text, setting_fields

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "examples").glob("*/settings*.toml"))
REQUIRED = """
[policy]
path = "policy"
[prompts]
train = "train.parquet"
[reward]
function = "exact_match"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(REQUIRED)
    return path


def test_command_line_over_environment_over_file_over_default(file: Path) -> None:
    def steps_and_group(environment: dict[str, str], *words: str) -> tuple[int, int]:
        settings = load_settings(file, words, environment)
        return settings.trainer.steps, settings.rollout.group_size

    assert steps_and_group({}) == (100, 8)
    file.write_text(REQUIRED + "[trainer]\nsteps = 1\n")
    assert steps_and_group({}) == (1, 8)
    assert steps_and_group({"RL__TRAINER__STEPS": "2", "PATH": "/bin"}) == (2, 8)
    assert steps_and_group({"RL__TRAINER__STEPS": "2"}, "--trainer.steps=3", "--rollout.group_size", "4") == (3, 4)
    assert steps_and_group({}, "--trainer.steps=3", "--trainer.steps=5") == (5, 8)


def test_a_run_can_be_set_without_a_file() -> None:
    words = ["--policy.path=p", "--prompts.train=t.jsonl", "--reward.function=exact_match"]
    settings = load_settings(None, words, {})
    assert settings.policy.path == Path("p")
    assert settings.run_folder == Path("runs/run")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("trainer.steps", "20", 20),
        ("learner.learning_rate", "1e-4", 1e-4),
        ("metrics.strict", "true", True),
        ("run.name", "20", "20"),
        ("run.name", "true", "true"),
        ("run.directory", "my runs", "my runs"),
        ("rollout.engine", "none", "none"),
        ("run.if_exists", "archive", "archive"),
        ("algorithm.clip_high", "none", None),
        ("algorithm.clip_high", "4", 4),
        ("algorithm.policy_loss_options", "{dual_clip = inf}", {"dual_clip": math.inf}),
        ("correction.reject", "{token_k1 = [0.5, 2]}", {"token_k1": [0.5, 2]}),
        ("prompts.test", "None", None),
        ("learner.betas", "[0.9, 0.99]", [0.9, 0.99]),
        ("prompts.template_options", "{enable_thinking = false}", {"enable_thinking": False}),
        ("trainer.steps", "many", "many"),
    ],
)
def test_texts_become_values(name: str, text: str, value: object) -> None:
    assert parse_text(name, text) == value


def test_values_of_every_kind_reach_the_settings(file: Path) -> None:
    words = [
        "--learner.betas=[0.8, 0.9]",
        "--prompts.template_options={enable_thinking = false, style = 'short'}",
        "--algorithm.clip_low=none",
        "--algorithm.policy_loss_options={dual_clip = inf}",
        "--algorithm.advantage_options={gamma = 0.9, whiten = false, weights = {style = 2}}",
        "--correction.reject={token_k1 = [0.5, 2], seq_sum_k3 = 1}",
        "--prompts.validation=validation.jsonl",
        "--learner.learning_rate=1",
    ]
    settings = load_settings(file, words, {})
    assert settings.learner.betas == (0.8, 0.9)
    assert settings.prompts.template_options == {"enable_thinking": False, "style": "short"}
    assert settings.algorithm.clip_low is None
    assert settings.algorithm.policy_loss_options == {"dual_clip": math.inf}
    assert settings.algorithm.advantage_options == {"gamma": 0.9, "whiten": False, "weights": {"style": 2.0}}
    assert settings.correction.reject == {"token_k1": (0.5, 2.0), "seq_sum_k3": 1.0}
    assert settings.prompts.validation == Path("validation.jsonl")
    assert settings.learner.learning_rate == 1.0


def test_settings_cannot_be_changed(file: Path) -> None:
    settings = load_settings(file, [], {})
    with pytest.raises(ValueError, match="frozen"):
        settings.run = settings.run
    with pytest.raises(AttributeError):
        settings.trainer.steps = 3  # type: ignore[misc]


def test_every_mistake_is_listed_at_once(file: Path) -> None:
    file.write_text("[trainer]\nsteps = 'x'\n[metrics]\nconsole = 'loud'\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(file, [], {})
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in sorted(lines)] == [
        "metrics.console",
        "policy.path",
        "prompts.train",
        "trainer.steps",
    ]


def test_every_setting_has_a_meaning_in_words() -> None:
    for setting in setting_fields().values():
        assert len(setting.meaning) >= 5, f"{setting.name} has no meaning in its section's docstring"
        assert setting.meaning.endswith("."), setting.name


def test_no_docstring_explains_a_setting_that_is_not_there() -> None:
    known = setting_fields()
    for section, field in Settings.model_fields.items():
        assert field.annotation is not None
        for name in attribute_meanings(field.annotation):
            assert f"{section}.{name}" in known


def test_help_explains_every_setting() -> None:
    text = help_text()
    squeezed = " ".join(text.split())
    for setting in setting_fields().values():
        assert f"--{setting.name}" in text
        assert setting.meaning in squeezed
    assert "RL__TRAINER__STEPS=20" in text
    assert "required" in text


def test_sections_are_small() -> None:
    sizes: dict[str, int] = {}
    for name in setting_fields():
        section = name.partition(".")[0]
        sizes[section] = sizes.get(section, 0) + 1
    assert max(sizes.values()) <= 15, sizes


def test_settings_files_are_shipped() -> None:
    assert {path.parent.name for path in SHIPPED} >= {"arithmetic", "gsm8k"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_shipped_settings_files_load(path: Path) -> None:
    load_settings(path, [], {})
