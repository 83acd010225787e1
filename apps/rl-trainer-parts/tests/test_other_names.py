"""What names of verl and TRL lead to."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.errors import SettingsError
from rl_core.files import parse_toml
from rl_distill.objectives import ADVANTAGES, AGGREGATIONS, POLICY_LOSSES
from rl_trainer_parts.settings.algorithm_choice import option_fields
from rl_trainer_parts.settings.fields import setting_fields
from rl_trainer_parts.settings.other_names import LISTS, Meaning, listed_names, meaning_of, table
from rl_trainer_parts.settings.sources import build_settings
from rl_trainer_parts.settings.suggestions import OF_ASYNC, ONLY_ASYNC, suggest

KNOWN = list(setting_fields())
ALL = {*KNOWN, *option_fields(), *(one for setting in setting_fields().values() for one in setting.entry_fields())}
GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "from-verl.md").read_text()
ASYNC = ("schedule.max_staleness", "schedule.sync_every", "schedule.partial_rollout", "schedule.validate_on")
LISTED = [(library, name) for library in LISTS for name in listed_names(library)]


def test_the_lists_are_those_of_the_versions_in_their_names() -> None:
    assert {library: len(listed_names(library)) for library in LISTS} == {"verl": 1259, "trl": 202}
    assert {"loss_type", "learning_rate", "reward_funcs"} <= set(listed_names("trl"))
    assert {"trainer.logger", "async_training.use_trainer_do_validate"} <= set(listed_names("verl"))


def test_every_name_of_verl_and_trl_has_a_counterpart_a_reason_or_none() -> None:
    assert [name for library, name in LISTED if meaning_of(name, library) is None] == []


def test_every_counterpart_is_a_setting() -> None:
    named = {one for row in table() for one in row.settings if not one.startswith("--")}
    assert {one for one in named if one.partition(".")[0] not in OF_ASYNC} <= ALL


def test_every_setting_in_a_note_exists() -> None:
    sections = "|".join({one.partition(".")[0] for one in KNOWN} - {"run"})
    notes = " ".join(row.note for row in table())
    mentioned = set(re.findall(rf"(?<![\w./])(?:{sections})\.(?!jsonl)[a-z_]+", notes))
    assert len(mentioned) > 20
    assert mentioned <= ALL
    reasons = [row for row in table() if row.kind == "refused" and not row.note.endswith(".")]
    assert reasons == []


def test_every_row_with_a_pattern_matches_a_name() -> None:
    dead = {row.name for row in table() if "*" in row.name} - {
        meaning.name for library, name in LISTED if (meaning := meaning_of(name, library))
    }
    of_pull_requests = ("*rollout.skip", "distillation.teacher_model*", "*.skip_use", "*.stream_teacher")
    assert {name for name in dead if not name.startswith(of_pull_requests)} == set()


def test_a_suggestion_is_exactly_what_the_table_says() -> None:
    wrong = [name for library, name in LISTED if not _says(suggest(name, KNOWN), meaning_of(name, library), name)]
    assert [name for name in wrong if name not in ALL] == []


def _says(hint: str, meaning: Meaning | None, name: str) -> bool:
    assert meaning is not None
    if meaning.kind == "refused":
        return hint == f" {meaning.note}" or "router's bias" in hint
    if meaning.kind == "without":
        return f"'{name}' has no counterpart here." in hint and hint.endswith(meaning.note)
    asked = hint.partition(" Did you mean ")[2].partition(" (")[0].rstrip("?")
    return asked == " or ".join(one if one.startswith("--") else repr(one) for one in meaning.settings) or (
        f"In rl-async-trainer, {meaning.settings[0]} does this" in hint
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("distillation_loss.loss_mode", "distillation.loss"),
        ("distillation.distillation_loss.loss_mode", "distillation.loss"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.policy_loss"),
        ("loss_mode", "algorithm.policy_loss distillation.loss"),
        ("teacher_model.model_path", "distillation.teachers.NAME.model"),
        ("distillation.teacher_model.model_path", "distillation.teachers.NAME.model"),
        ("distillation.teacher_models.large.model_path", "distillation.teachers.NAME.model"),
        ("distillation.teachers.large.model_path", "distillation.teachers.large.model"),
        ("enable_resource_pool", "distillation.teachers.NAME.resources"),
        ("distillation.teacher_model.enable_resource_pool", "distillation.teachers.NAME.resources"),
        ("skip.enable", "rollout_cache.enabled"),
        ("skip_rollout", "rollout_cache.enabled"),
        ("actor_rollout_ref.rollout.skip_rollout", "rollout_cache.enabled"),
        ("skip_dump_dir", "rollout_cache.directory"),
        ("dump_dir", "rollout_cache.directory"),
        ("skip.dump_dir", "rollout_cache.directory"),
        ("rollout.skip.dump_dir", "rollout_cache.directory"),
        ("max_dump_step", "rollout_cache.steps"),
        ("skip.max_dump_step", "rollout_cache.steps"),
        ("trainer.logger", "metrics.trackers metrics.console"),
        ("trainer.rollout_data_dir", "metrics.log_rollouts"),
        ("trainer.validation_data_dir", "metrics.log_val_generations"),
        ("log_val_generations", "metrics.log_val_generations"),
        ("lr", "optimizer.learning_rate critic.learning_rate"),
        ("critic.lr", "critic.learning_rate"),
        ("distillation.max_model_len", "distillation.teachers.NAME.max_model_len"),
        ("lora_target_modules", "lora.target_modules"),
        ("tp", "vllm.tensor_parallel_size parallel.tensor"),
        ("engine.tp", "vllm.tensor_parallel_size"),
        ("dp", "replicas.count parallel.ranks"),
        ("ep", "parallel.expert"),
        ("parallel.cp", "parallel.context"),
        ("experiment_name", "run.name"),
        ("trainer.loggers", "metrics.trackers metrics.console"),
        ("trainer.log_val_generation", "metrics.log_val_generations"),
        ("trainer.svae_freq", "trainer.checkpoint_every"),
        ("loss_mdoe", "algorithm.policy_loss distillation.loss"),
        ("custom_reward_function", "reward.function"),
        ("reward_function", "reward.function"),
        ("reward_fn", "reward.function"),
        ("skip.rollout", "rollout_cache.enabled rollout_cache.action"),
        ("expert_parallel_size", "parallel.expert"),
        ("rollout", "rollout.engine rollout.placement rollout.loop"),
        ("num-generations", "rollout.group_size"),
        ("+actor_rollout_ref.actor.optim.lr", "optimizer.learning_rate"),
    ],
)
def test_names_that_users_of_verl_bring(name: str, settings: str) -> None:
    assert re.findall(r"'([^']+)'", suggest(name, KNOWN).partition(" (")[0]) == settings.split()


def test_settings_of_the_other_trainer_are_named() -> None:
    hint = ' In rl-async-trainer, schedule.validate_on does this (true is "learner").'
    assert suggest("use_trainer_do_validate", KNOWN) == suggest("async_training.use_trainer_do_validate", KNOWN) == hint
    known = [*KNOWN, "schedule.validate_on"]
    assert suggest("use_trainer_do_validate", known).startswith(" Did you mean 'schedule.validate_on'")


@pytest.mark.parametrize("name", ONLY_ASYNC)
def test_settings_of_the_other_trainer_are_known_without_their_section(name: str) -> None:
    assert suggest(name, KNOWN) == f" schedule.{name} is a setting of rl-async-trainer."
    assert suggest(name, [*KNOWN, f"schedule.{name}"]) == f" Did you mean 'schedule.{name}'?"
    assert "schedule.max_staleness does this" in suggest("staleness_treshold", KNOWN)


def test_what_is_missing_is_said_with_the_reason() -> None:
    assert suggest("data.shuffle", KNOWN) == " Training prompts are always in random order, by run.seed."
    assert suggest("stream_teacher_with_rollout", KNOWN).startswith(" A teacher always scores")
    assert suggest("skip_use_default_dir", KNOWN) == " rollout_cache.directory is always the folder that is used."
    assert suggest("data.use_shm", KNOWN) == " verl's 'data.use_shm' has no counterpart here."
    assert suggest("torch_empty_cache_steps", KNOWN).startswith(" TRL's 'torch_empty_cache_steps' has no counterpart")


@pytest.mark.parametrize(
    "name",
    [
        *("banana", "trainer.banana", "foo.bar", "policy.colour", "run.owner", "metrics.dashboard"),
        *("rollout.speed", "learner.magic", "trainer.goal", "logs", "skip.everything", "zzz.qqq", "model.name"),
        *("trainer.verbose", "algorithm.kl_goal", "distillation.students", "health.emails", "trainer.gpu"),
        *("distillation.loss_type", "distillation.mode", "skip.max_steps", "lora.target"),
        *("model_path", "reward.model_path", "judge.model_path", "algorithm.type", "mode", "type"),
        *("reward.seed", "skip.top_p", "distillation.tokenizer", "critic.beta", "skip.repeat", "max_seq_len"),
        *(
            "attn_implementation",
            "health.ppo_epochs",
            "cluster.limit_images",
            "step",
            "lora.fp16",
            "trainer.devote",
            "trainer.stats",
        ),
    ],
)
def test_other_words_get_no_suggestion(name: str) -> None:
    assert suggest(name, KNOWN) == ""


@pytest.mark.parametrize(
    ("setting", "found", "hint"),
    [
        ('distillation.loss="forward_kl_topk"', "found 'forward_kl_topk'", 'Use loss = "forward_kl" with distribution'),
        ('distillation.loss="low_var_kl"', "found 'low_var_kl'", "Did you mean 'k3', verl's 'low_var_kl'?"),
        ('rollout_cache.action="REPEAT"', "found 'REPEAT'", "Did you mean 'repeat'?"),
        ('rollout_cache.action="CACHE"', "found 'CACHE'", "Did you mean 'cache'?"),
        ('rollout_cache.action="REPEAT_LAST"', "found 'REPEAT_LAST'", "Did you mean 'repeat_last'?"),
        ("dynamic_sampling.filter=true", "found True", "Did you mean 'reward_spread', verl's 'true'?"),
        ('metrics.trackers="wandb"', "found 'wandb'", 'Write ["wandb"].'),
        ('metrics.trackers=["swanlab"]', "found 'swanlab' in item 0", "verl's 'swanlab' is missing here."),
        ('metrics.trackers=["console"]', "found 'console' in item 0", "Leave it out: metrics.console chooses"),
    ],
)
def test_values_that_users_of_verl_bring(setting: str, found: str, hint: str) -> None:
    name, _, value = setting.partition("=")
    section, _, key = name.partition(".")
    needed = {"policy": {"path": "p"}, "prompts": {"train": "t"}, "reward": {"function": "exact_match"}}
    with pytest.raises(SettingsError) as error:
        build_settings({**needed, section: {key: parse_toml(f"value = {value}", where=name)["value"]}})
    assert str(error.value).startswith(f"{name}: must be ")
    assert f"; {found}. {hint}" in str(error.value)


def _rows(heading: str) -> Iterator[list[list[str]]]:
    """The names in the cells of each row of the table below a line of the guide."""
    for line in GUIDE.partition(f"\n{heading}")[2].partition("\n|---")[2].partition("\n\n")[0].splitlines()[1:]:
        yield [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1]]


def test_the_guide_has_the_settings_of_the_table() -> None:
    pairs = [(name, row[2][0]) for row in _rows("## Settings") for name in (*row[0], *row[1])]
    assert len(pairs) > 75
    assert [(name, ours) for name, ours in pairs if f"'{ours}'" not in suggest(name, [*KNOWN, *ASYNC])] == []
    assert {name for name, _ in pairs} <= {name for _, name in LISTED}


@pytest.mark.parametrize(
    ("heading", "known", "missing"),
    [
        ("| verl's `adv_estimator`", set(ADVANTAGES.names()), set()),
        ("| verl's `loss_mode`", set(POLICY_LOSSES.names()), set()),
        ("| verl's `loss_agg_mode`", set(AGGREGATIONS.names()), set()),
    ],
)
def test_the_guide_has_every_algorithm(heading: str, known: set[str], missing: set[str]) -> None:
    rows = list(_rows(heading))
    theirs = {name for row in rows for name in row[0]}
    # verl's vanilla, grpo without its deviation, and what verl lacks
    assert known - theirs <= {"ppo_clip", "dr_grpo", "lite_ppo", "maxrl"}
    assert missing <= theirs - known
    assert known <= {name for row in rows for name in (*row[0], *row[1])}
