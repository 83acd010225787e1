"""`[distillation]` is checked before models load; each message names the teacher or setting."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invented_inputs import invented_inputs

from rl_core import Prompt
from rl_core.errors import DataError, SettingsError
from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.checks.distillation import check_teachers
from rl_trainer_parts.checks.unused import unused_settings
from rl_trainer_parts.commands.plan import describe_plan
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
CPUS = len(os.sched_getaffinity(0))


def make_model(folder: Path, *, tokens: str = "abc", **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    vocab = {token: index for index, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}))
    (folder / "model.safetensors").write_text("")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("{}")
    make_model(tmp_path / "policy")
    make_model(tmp_path / "large")
    return tmp_path


def settings_with(folder: Path, changes: dict[str, Any], **large: Any) -> Settings:
    """Return settings with a teacher `large` for the source "math"."""
    values: dict[str, dict[str, Any]] = {
        "policy": {"path": folder / "policy"},
        "prompts": {"train": folder / "train.jsonl"},
        "reward": {"function": "exact_match"},
        "distillation": {
            "teachers": {"large": {"model": folder / "large", "data_sources": ["math"], **large}},
            "top_k": 8,
        },
    }
    for name, value in changes.items():
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    return build_settings(values)


def problems(folder: Path, changes: dict[str, Any] | None = None, **large: Any) -> list[str]:
    try:
        check_settings(settings_with(folder, changes or {}, **large))
    except SettingsError as error:
        return str(error).splitlines()
    return []


def test_a_teacher_is_enough(folder: Path) -> None:
    assert problems(folder) == problems(folder, data_sources=[]) == []


def test_one_session_a_prompt_is_enough_where_nothing_is_learnt_from_rewards(folder: Path) -> None:
    assert problems(folder, {"rollout.group_size": 1}) == []
    (problem,) = problems(folder, {"rollout.group_size": 1, "distillation.use_task_rewards": True})
    assert "group_size must be at least 2" in problem


@pytest.mark.parametrize(
    ("changes", "large", "message"),
    [
        ({"distillation.top_k": 33}, {}, "distillation.teachers.large: distillation.top_k = 33 exceeds its voc"),
        ({"distillation.top_k": 1001}, {}, "distillation.top_k must be at most 1000; found 1001"),
        ({"distillation.top_k": 0}, {}, "distillation.top_k must be at least 1; found 0"),
        ({"distillation.beta": 1}, {}, "distillation.beta must be below 1; found 1"),
        ({"distillation.temperature": 0.5}, {}, "distillation.temperature = 0.5 needs Megatron teachers"),
        ({"distillation.distribution": "full"}, {}, 'teachers.large.engine = "vllm"'),
        ({"distillation.distribution": "full", "distillation.loss": "k1"}, {"engine": "megatron"}, "not use full"),
        ({"distillation.used_as": "reward"}, {}, 'used_as = "reward" needs a loss that uses only the sampled token'),
        ({"distillation.loss": "nll"}, {}, 'loss = "nll" imitates texts'),
        ({"distillation.max_loss": 0}, {}, "distillation.max_loss must be above 0"),
        ({"distillation.min_logprob": 1}, {}, "distillation.min_logprob must be below 0, or none; found 1"),
        ({"distillation.default_teacher": "larg"}, {}, "Did you mean 'large'?"),
        ({"distillation.loss": "k1", "rollout.temperature": 0.7}, {}, "must be rollout.temperature = 0.7"),
        ({"algorithm.kl_coefficient": 0.1}, {}, "algorithm.kl_coefficient applies to the policy"),
        ({"correction.weights": "token", "algorithm.old_logprobs": "recompute"}, {}, "correction.weights applies to"),
        ({"algorithm.advantage": "gae"}, {}, 'algorithm.advantage = "gae" needs distillation.use_task_rewards'),
        ({"distillation.texts": "answer", "distillation.loss": "k2"}, {}, "needs tokens that the policy"),
        ({"distillation.texts": "answer", "distillation.use_task_rewards": True}, {}, "no policy gradient"),
        ({}, {"replicas": 0}, "distillation.teachers.large.replicas must be at least 1"),
        ({}, {"restarts": -1}, "distillation.teachers.large.restarts must be at least 0"),
        ({}, {"resources": {"cpus": -1}}, "distillation.teachers.large.resources.cpus must be at least 0"),
        ({}, {"data_sources": [""]}, "distillation.teachers.large.data_sources must be of length 1 or more; found ''"),
        ({}, {"max_model_len": 100}, "distillation.teachers.large.max_model_len = 100 is too short"),
        ({}, {"max_model_len": 5000}, "max_position_embeddings = 4096, fewer than"),
        ({}, {"tensor": 2, "engine": "megatron"}, "num_key_value_heads"),
        ({}, {"model": "nowhere"}, "distillation.teachers.large.model: nowhere does not exist"),
        ({"cluster.ray_address": "h:1"}, {"placement": "ray"}, "teachers.large.resources.gpus must be set when the"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(
    folder: Path, changes: dict[str, Any], large: dict[str, Any], message: str
) -> None:
    found = problems(folder, changes, **large)
    assert any(message in problem for problem in found), found


def test_a_teacher_with_fewer_positions_than_a_trajectory_is_refused(folder: Path) -> None:
    make_model(folder / "short", max_position_embeddings=2000)
    (problem,) = problems(folder, model=folder / "short")
    assert problem.startswith("distillation.teachers.large.model: ")
    assert "max_position_embeddings = 2000, fewer than the longest trajectory needs" in problem
    assert "add up to 2048 tokens" in problem


def test_a_whole_distribution_needs_a_teacher_that_knows_every_token(folder: Path) -> None:
    make_model(folder / "narrow", vocab_size=16)
    changes = {"distillation.distribution": "full", "distillation.top_k": 4}
    (problem,) = problems(folder, changes, model=folder / "narrow", engine="megatron")
    assert "teachers.large has 16 tokens in its vocabulary, but the policy has 32" in problem


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "a b", "..", "-a", "ä", "default\n"])
def test_names_that_could_not_stand_in_metrics_and_files_are_refused_and_not_dropped(folder: Path, name: str) -> None:
    teachers = {name: {"model": folder / "large", "data_sources": ["math"]}}
    found = problems(folder, {"distillation.teachers": teachers})
    assert len(found) == 1
    assert f"teachers: {name!r} is not a valid teacher name" in found[0]


@pytest.mark.parametrize("name", ["default", "teacher_model", "Qwen3-8B", "7", "_"])
def test_other_names_work(folder: Path, name: str) -> None:
    teachers = {name: {"model": folder / "large", "data_sources": ["math"]}}
    assert problems(folder, {"distillation.teachers": teachers}) == []


def test_two_teachers_for_one_source_are_refused(folder: Path) -> None:
    teachers = {
        name: {"model": folder / "large", "data_sources": sources}
        for name, sources in {"large": ["math", "code"], "small": ["code"]}.items()
    }
    (problem,) = problems(folder, {"distillation.teachers": teachers})
    assert "distillation.teachers.large and distillation.teachers.small both score 'code'" in problem


def test_a_pool_that_does_not_add_up_is_refused_with_what_others_have(folder: Path) -> None:
    teachers = {
        name: {"model": folder / "large", "data_sources": [name], "replicas": 1, "resources": {"cpus": cpus, "gpus": 0}}
        for name, cpus in {"first": 0.75, "second": CPUS}.items()
    }
    cluster = {"cluster.placement": "process", "cluster.cpus_per_rank": 0.25, "cluster.gpus_per_rank": 0}
    (problem,) = problems(folder, {"distillation.teachers": teachers, **cluster})
    assert problem.startswith(f"distillation.teachers.second reserves 1 x {CPUS} CPUs and 0 GPUs")
    assert "(reserved: the learner 1 x 0.25 CPUs and 0 GPUs; teacher 'first' 1 x 0.75 CPUs and 0 GPUs)" in problem
    assert "room for 0 of 1" in problem


def test_ranks_of_all_replicas_count(folder: Path) -> None:
    make_model(folder / "wide", num_key_value_heads=2)
    share = {"resources": {"cpus": CPUS / 4, "gpus": 0}, "engine": "megatron", "model": folder / "wide"}
    assert problems(folder, replicas=2, tensor=2, **share) == []
    (problem,) = problems(folder, replicas=3, tensor=2, **share)
    assert "replicas = 3, tensor = 2" in problem
    assert "room for 4 of 6" in problem


def test_every_mistake_is_told_at_once(folder: Path) -> None:
    found = problems(folder, {"distillation.top_k": 0, "distillation.coefficient": 0}, replicas=0)
    assert len(found) == 3


def prompt(uid: str, source: str = "math", **columns: Any) -> Prompt:
    return Prompt(uid=uid, input_ids=np.asarray([0], np.int32), data_source=source, columns=columns)


def refused(settings: Settings, *prompts: Prompt) -> str:
    class Tokenizer:
        eos_token_id = 2

        def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
            return [[0] * len(text) for text in texts]

    with pytest.raises((SettingsError, DataError)) as caught:
        check_teachers(settings, Tokenizer(), prompts)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_source_that_no_teacher_answers_for_is_refused_with_all_sources(folder: Path) -> None:
    found = refused(settings_with(folder, {}), prompt("a"), prompt("b", "code"), prompt("c", "law"))
    assert "no teacher scores prompts whose data_source is 'code', 'law'; 'large' scores 'math'" in found


def test_a_teacher_that_nothing_reaches_is_refused(folder: Path) -> None:
    found = refused(settings_with(folder, {"distillation.default_teacher": "large"}), prompt("a", "maths"))
    assert "teachers.large.data_sources has 'math', but no prompt has it" in found
    assert "Did you mean 'maths'?" in found


def test_a_prompt_without_the_column_is_named(folder: Path) -> None:
    settings = settings_with(folder, {"distillation.route_by": "level"}, data_sources=["1"])
    found = refused(settings, prompt("a", level=1), prompt("b", difficulty=2))
    assert "distillation.route_by = 'level' must be a column with one value in every prompt; prompt 'b'" in found
    assert "its columns: 'difficulty'" in found


def test_another_vocabulary_is_refused_with_the_tokens_that_differ(folder: Path) -> None:
    make_model(folder / "other", tokens="abd")
    found = refused(settings_with(folder, {}, model=folder / "other"), prompt("a"))
    assert "distillation.teachers.large must have the student's vocabulary" in found
    assert "id 2: student 'c', teacher 'd'" in found


def test_prompts_without_their_texts_are_refused(folder: Path) -> None:
    settings = settings_with(folder, {"distillation.texts": "answer"})
    assert "which prompt 'b' does not have" in refused(settings, prompt("a", answer="abc"), prompt("b"))


def test_the_plan_shows_teachers_with_sources_places_and_memory(folder: Path) -> None:
    settings = settings_with(
        folder, {"distillation.default_teacher": "large"}, replicas=2, resources={"cpus": 0.5, "gpus": 0}
    )
    text = describe_plan(settings, invented_inputs(train=64))
    assert "teacher    large: vllm, float32, 2 replicas in processes with 0.5 CPUs and 0 GPUs each" in text
    assert f"{folder / 'large'}, for data_source 'math' and all others" in text
    assert "distils    forward_kl of the top 8 tokens, with a bucket for the rest, as a loss; no task rewards" in text
    assert "teacher    large: 2 x 0.24 MiB weights + 1 GiB KV cache (on a CPU), for " in text


OWN = {"model": "policy", "prompts": ["{hint}{prompt}"]}


def own_problems(folder: Path, changes: dict[str, Any] | None = None, **own: Any) -> list[str]:
    """Return the problems of a policy that is its own teacher."""
    values = {"distillation.teachers": {}, "distillation.self_teacher": {**OWN, **own}, **(changes or {})}
    return problems(folder, values)


def test_a_policy_can_be_its_own_teacher(folder: Path) -> None:
    assert own_problems(folder) == own_problems(folder, model="average", prompts=[]) == []
    assert own_problems(folder, {"rollout.group_size": 1, "distillation.temperature": 0.5}) == []


@pytest.mark.parametrize(
    ("changes", "own", "message"),
    [
        ({}, {"prompts": []}, 'self_teacher.model = "policy" needs self_teacher.prompts'),
        ({"distillation.texts": "a"}, {}, 'self_teacher.model = "policy" scores all trajectories with the learner'),
        ({"distillation.cache": "a"}, {}, "with the learner; omit cache"),
        ({"distillation.other_tokenizer": "align"}, {}, "with the learner; omit other_tokenizer"),
        ({"distillation.default_teacher": "a"}, {}, "with the learner; omit default_teacher"),
        ({"distillation.teachers": {"a": {"model": "b"}}}, {}, "with the learner; omit teachers"),
        ({"distillation.loss": "nll"}, {}, 'loss = "nll" imitates texts and needs no teacher'),
        ({"distillation.top_k": 33}, {}, "distillation.top_k = 33 exceeds the policy's 32 tokens"),
        ({"rollout.loop": "tools"}, {}, 'rollout.loop = "tools" renders prompts itself'),
        ({}, {"average_decay": 1}, "distillation.self_teacher.average_decay must be below 1; found 1"),
        ({"rollout.temperature": 0.7, "distillation.loss": "k3"}, {}, "must be rollout.temperature = 0.7"),
    ],
)  # fmt: skip
def test_what_a_policy_cannot_teach_itself_is_refused_by_name(
    folder: Path, changes: dict[str, Any], own: dict[str, Any], message: str
) -> None:
    found = own_problems(folder, changes, **own)
    assert any(message in problem for problem in found), found


def test_options_of_a_teacher_that_is_off_are_refused_or_noted(folder: Path) -> None:
    (problem,) = own_problems(folder, {"distillation.top_k": 64}, model=None)
    assert "self_teacher = " in problem
    assert "has no effect, since distillation is off" in problem
    for own, expected in {
        ("average_decay", 0.5): "distillation.self_teacher.average_decay has no effect with distillation.self_teacher",
        ("model", "average"): "distillation.deadline_s has no effect with distillation.self_teacher.model = ",
    }.items():
        values = {"distillation.teachers": {}, "distillation.deadline_s": 5.0}
        settings = settings_with(folder, values | {"distillation.self_teacher": {**OWN, own[0]: own[1]}})
        assert any(expected in line for line in unused_settings(settings))
    beside = settings_with(folder, {"distillation.self_teacher": {"prompts": ["a"]}})
    assert any("self_teacher.prompts has no effect without" in line for line in unused_settings(beside))


def test_the_plan_shows_a_policy_that_teaches_itself(folder: Path) -> None:
    changes = {"distillation.teachers": {}, "distillation.self_teacher": {**OWN, "model": "average"}}
    text = describe_plan(settings_with(folder, changes), invented_inputs(train=64))
    assert "teacher    the learner's average (decay 0.95), under '{hint}{prompt}'" in text
    assert "distils    forward_kl of the top 8 tokens, with a bucket for the rest, as a loss; no task rewards" in text
    assert "average    0.24 MiB in float32 over all ranks" in text
    text = describe_plan(
        settings_with(folder, {**changes, "distillation.self_teacher": {"model": "reference"}}),
        invented_inputs(train=64),
    )
    assert "teacher    the learner's reference, under the policy's prompts" in text
    assert "reference  0.24 MiB (weights)" in text
