"""Sources of settings, their precedence, and their help."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_async_trainer.plan import ASYNC_UNUSED
from rl_async_trainer.settings import AsyncSettings
from rl_core.errors import SettingsError
from rl_trainer_parts.checks.unused import RULES
from rl_trainer_parts.settings.algorithm_choice import options_of
from rl_trainer_parts.settings.fields import attribute_meanings, help_text, setting_fields
from rl_trainer_parts.settings.other_names import _document
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import load_settings, parse_text

ROOT = Path(__file__).resolve().parents[3]
OLDER: dict[str, str] = _document()["older"]
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


@pytest.mark.parametrize("case", [str.upper, str.lower, str.capitalize])
def test_variables_named_like_sections_are_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, case: Callable[[str], str]
) -> None:
    before = load_settings(file)
    for section in Settings.model_fields:
        monkeypatch.setenv(case(section), "prod")
    monkeypatch.setenv(case("algorithm"), '{"kl_coefficient": 0.5}')
    assert load_settings(file) == before


def test_command_line_wins_over_environment_over_file_over_default(file: Path) -> None:
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
        ("optimizer.learning_rate", "1e-4", 1e-4),
        ("metrics.strict", "true", True),
        ("run.name", "20", "20"),
        ("run.name", "true", "true"),
        ("run.directory", "my runs", "my runs"),
        ("rollout.engine", "none", "none"),
        ("run.if_exists", "archive", "archive"),
        ("algorithm.clip_high", "none", None),
        ("algorithm.clip_high", "4", 4),
        ("algorithm.dual_clip", "inf", "inf"),
        ("correction.reject", "{token_k1 = [0.5, 2]}", {"token_k1": [0.5, 2]}),
        ("prompts.test", "None", None),
        ("optimizer.betas", "[0.9, 0.99]", [0.9, 0.99]),
        ("prompts.template_options", "{enable_thinking = false}", {"enable_thinking": False}),
        ("trainer.steps", "many", "many"),
    ],
)
def test_texts_become_values(name: str, text: str, value: object) -> None:
    assert parse_text(name, text) == value


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("steps=4", "--trainer.steps=4"),
        ("trainer.steps=4", "--trainer.steps=4"),
        ("group_size=8", "--rollout.group_size=8"),
        ("stepz=4", "--stepz=4"),
    ],
)
def test_a_bare_name_is_written_out(file: Path, word: str, written: str) -> None:
    with pytest.raises(SettingsError, match=rf"unexpected argument '{word}'; write {written}\.$"):
        load_settings(file, [word], {})


def test_all_mistakes_are_told_at_once(file: Path) -> None:
    file.write_text(REQUIRED + "[trainer]\nsteps = true\n[trainr]\nsteps = 5\n[replicas]\ncount = 'many'\n")
    environment = {"RL__RUN__SEEED": "1", "RL__RUN__SEED": "one"}
    words = ["--rollout.group_sise=2", "trainer.steps=3", "--optimizer.learning_rate"]
    with pytest.raises(SettingsError) as refused:
        load_settings(file, words, environment)
    beginnings = [
        *("unknown setting 'trainr.steps'", "unknown setting 'run.seeed'", "unknown setting 'rollout.group_sise'"),
        *("unexpected argument 'trainer.steps=3'", "--optimizer.learning_rate needs a value"),
        *("trainer.steps: must be integer; found true", "run.seed: ", "replicas.count: "),
    ]
    lines = str(refused.value).splitlines()
    assert [one for one in beginnings if sum(line.startswith(one) for line in lines) != 1] == []
    assert len(lines) == len(beginnings)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--rollout.temperature=inf", "rollout.temperature must be above 0 and finite; found inf"),
        ("--rollout.deadline_s=nan", "rollout.deadline_s must be above 0 and finite; found nan"),
        ("--rollout.audit_share=1.5", "rollout.audit_share must be at most 1; found 1.5"),
        ("--trainer.steps=0", "trainer.steps must be at least 1; found 0"),
        ("--optimizer.learning_rate=0", "optimizer.learning_rate must be above 0; found 0"),
    ],
)
def test_a_number_out_of_bounds_is_refused(file: Path, word: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(file, [word], {})
    assert str(refused.value) == f"{message} (command line)."


def test_a_cap_of_infinity_caps_nothing(file: Path) -> None:
    assert load_settings(file, ["--correction.cap=inf"], {}).correction.cap == math.inf


def test_values_of_every_kind_reach_the_settings(file: Path) -> None:
    words = [
        "--optimizer.betas=[0.8, 0.9]",
        "--prompts.template_options={enable_thinking = false, style = 'short'}",
        "--algorithm.clip_low=none",
        "--algorithm.advantage=gae",
        "--algorithm.dual_clip=inf",
        "--algorithm.gamma=0.9",
        "--algorithm.whiten=false",
        "--correction.reject={token_k1 = [0.5, 2], seq_sum_k3 = 1}",
        "--prompts.validation=validation.jsonl",
        "--optimizer.learning_rate=1",
    ]
    settings = load_settings(file, words, {})
    assert settings.optimizer.betas == (0.8, 0.9)
    assert settings.prompts.template_options == {"enable_thinking": False, "style": "short"}
    assert settings.algorithm.clip_low is None
    assert options_of(settings.algorithm, "policy_loss") == {"dual_clip": math.inf}
    assert options_of(settings.algorithm, "advantage") == {"gamma": 0.9, "lam": 1.0, "whiten": False}
    assert settings.correction.reject == {"token_k1": (0.5, 2.0), "seq_sum_k3": 1.0}
    assert settings.prompts.validation == Path("validation.jsonl")
    assert settings.optimizer.learning_rate == 1.0


TEACHERS = """
[distillation.teachers.large]
model = "teachers/large"
data_sources = ["math", "code"]
resources = {cpus = 2}
[distillation.teachers.small]
model = "teachers/small"
"""


def test_tables_of_entries_are_read_and_changed_one_by_one(file: Path) -> None:
    file.write_text(REQUIRED + TEACHERS)
    words = ["--distillation.teachers.large.replicas=3", "--distillation.teachers.small.resources.cpus=0.5"]
    environment = {"RL__DISTILLATION__TEACHERS__LARGE__RESOURCES__GPUS": "0", "RL__DISTILLATION__TOP_K": "8"}
    distillation = load_settings(file, words, environment).distillation
    large, small = distillation.teachers["large"], distillation.teachers["small"]
    assert (large.model, large.data_sources, large.replicas) == (Path("teachers/large"), ("math", "code"), 3)
    assert (large.resources.cpus, large.resources.gpus) == (2.0, 0.0)
    assert (small.replicas, small.resources.cpus) == (1, 0.5)
    assert distillation.top_k == 8


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--distillation.teachers.large.replica=3", r"unknown setting 'distillation.teachers.large.replica'"),
        (
            "--distillation.teachers.large.replicas=x",
            r"teachers.large.replicas: must be integer; found 'x' \(command line",
        ),
        ("--distillation.teachers.large.replicas=true", r"teachers.large.replicas: must be integer; found true"),
        ("--distillation.teachers.new.replicas=1", r"teachers.new.model: required, and not set. Hugging Face folder"),
        (
            "--distillation.teachers.large.data_sources=[1]",
            r"large.data_sources: must be \[text, ...\]; found integer in item 0 ",
        ),
        (
            "--distillation.teachers.large={model = 'x', engin = 'y'}",
            r"unknown setting '.*large.engin'.*mean '.*large.engine'",
        ),
        ("--distillation.teachers=3", r"distillation.teachers: must be {name = value}; found 3"),
    ],
)
def test_mistakes_in_entries_are_told_by_their_whole_names(file: Path, word: str, message: str) -> None:
    file.write_text(REQUIRED + TEACHERS)
    with pytest.raises(SettingsError, match=message):
        load_settings(file, [word], {})


def test_every_setting_that_may_have_no_effect_is_one() -> None:
    names = {pattern for rule in (*RULES, *ASYNC_UNUSED) for pattern in rule.names}
    known = [*setting_fields(AsyncSettings)]
    assert [one for one in names if not any(f"{name}." == one or name.startswith(one) for name in known)] == []


@pytest.mark.parametrize("word", ["--learner.magic=1", "--skip.everything=1"])
def test_an_unknown_name_of_an_earlier_section_leads_to_the_new_section(file: Path, word: str) -> None:
    section = word[2:].partition(".")[0]
    with pytest.raises(SettingsError, match=rf"unknown setting .* \[{section}\] is called \[{OLDER[section]}\]"):
        load_settings(file, [word], {}, kind=AsyncSettings)


@pytest.mark.parametrize("old", OLDER)
def test_a_name_of_an_earlier_version_is_refused_with_the_new_one(file: Path, old: str) -> None:
    new = OLDER[old]
    key = "" if "." in old else ".seed" if old in ("engine", "learner") else ".enabled" if old == "skip" else ".filter"
    assert f"{new}{key}" in setting_fields(AsyncSettings)
    with pytest.raises(SettingsError) as wrong:
        load_settings(file, [f"--{old}{key}=1"], {}, kind=AsyncSettings)
    assert str(wrong.value) == f"{old}{key} (command line) is called {new}{key} since version 0.2. Write {new}{key}."


def test_a_section_without_a_name_is_not_called_an_earlier_one(file: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'trainer\.' \(environment variable RL__TRAINER__\)\."):
        load_settings(file, [], {"RL__TRAINER__": "7"})


def test_empty_sections_are_those_of_today(file: Path) -> None:
    file.write_text(REQUIRED + "[skip]\n[nonsense]\n[trainer]\n")
    with pytest.raises(SettingsError) as wrong:
        load_settings(file, [], {})
    first, second = str(wrong.value).splitlines()
    assert first == f"skip ({file}) is called rollout_cache since version 0.2. Write rollout_cache."
    assert second.startswith("unknown setting 'nonsense'")


def test_settings_cannot_be_changed(file: Path) -> None:
    settings = load_settings(file, [], {})
    with pytest.raises(ValueError, match="frozen"):
        settings.run = settings.run
    with pytest.raises(AttributeError, match="cannot assign to field 'steps'"):
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
    settings = setting_fields().values()
    assert len(settings) > 100
    for setting in settings:
        assert len(setting.meaning) >= 5, f"{setting.name} has no meaning in its section's docstring"
        assert setting.meaning.endswith("."), setting.name


def test_no_docstring_explains_a_setting_that_is_not_there() -> None:
    sections = {section: field.annotation for section, field in Settings.model_fields.items()}
    explained = {f"{section}.{name}" for section, kind in sections.items() if kind for name in attribute_meanings(kind)}
    assert len(explained) > 100
    assert explained - set(setting_fields()) == set()


def test_help_explains_every_setting() -> None:
    text = help_text("usage")
    squeezed = " ".join(text.split())
    teachers = setting_fields()["distillation.teachers"].entry_fields()
    assert "distillation.teachers.NAME.resources.gpus" in teachers
    for setting in (setting_fields() | teachers).values():
        assert setting.meaning.endswith("."), setting.name
        assert f"--{setting.name}" in text
        assert setting.meaning in squeezed
    assert "RL__TRAINER__STEPS=20" in text
    assert "required" in text


@pytest.mark.parametrize(
    ("topic", "has", "lacks"),
    [
        (
            "trainer",
            [
                "[trainer]  The training loop.",
                "--trainer.steps=integer  (from 1 to 1000000000; default 100; may differ on resume)",
                "--trainer.minibatches=integer  (at least 1; default 1)",
                "--trainer.proof_tolerance=number | none  (above 0 and finite; default none; may differ on resume)",
            ],
            ["--run.", "usage"],
        ),
        ("optimizer.learning_rate", ["--optimizer.learning_rate=number", "Peak learning rate."], ["critic", "warmup"]),
        ("steps", ["--trainer.steps", "--rollout_cache.steps"], ["warmup_steps"]),
        ("teachers", ["--distillation.teachers.NAME.model=path  (required)"], ["top_k="]),
    ],
)
def test_help_explains_a_section_or_a_setting(topic: str, has: list[str], lacks: list[str]) -> None:
    text = help_text("usage", topic=topic)
    assert [words for words in has if words not in text] == []
    assert [words for words in lacks if words in text] == []


def test_help_on_nothing_that_there_is_names_the_sections() -> None:
    with pytest.raises(
        SettingsError, match=r"'trianer' is neither a section nor a setting. Did you mean 'trainer'\? .*: run, policy,"
    ):
        help_text("usage", topic="trianer")
    with pytest.raises(
        SettingsError, match=r"'learner' is neither a section nor a setting. Did you mean 'optimizer'\?"
    ):
        help_text("usage", topic="learner")


def test_help_speaks_of_no_class() -> None:
    kept = {"NAME", "MLFLOW_TRACKING_URI"}
    named = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", help_text("usage"))) - kept
    assert named <= {"IcePop", "ConnectionError", "LoRA"}, named


def test_sections_are_small() -> None:
    sizes: dict[str, int] = {}
    for name in setting_fields():
        section = name.partition(".")[0]
        sizes[section] = sizes.get(section, 0) + 1
    assert sizes.pop("distillation") <= 24, "what it compares, with which teachers or itself, and off policy"
    assert sizes.pop("optimizer") <= 24, "Adam or Muon, and how a GPU's time and memory are spent"
    assert sizes.pop("trainer") <= 19, "the loop, and what validation should reach"
    assert sizes.pop("vllm") <= 19, "an engine's options, four of which a trainer sets itself"
    assert max(sizes.values()) <= 18, sizes


def test_settings_files_are_shipped() -> None:
    assert {path.parent.name for path in SHIPPED} >= {"arithmetic", "gsm8k"}


@pytest.mark.parametrize("word", ["--run.directory=\udcff", '--rollout.loop_options={a = "\udcff"}'])
def test_values_that_no_file_can_hold_are_refused(word):
    with pytest.raises(SettingsError, match=r"must be text in UTF-8; found .*udcff.* \(command line\)"):
        load_settings(None, [word], {})
