"""Settings refused by checking only numbers and names."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal

from rl_core.errors import SettingsError
from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.checks.models import trainable_problems
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings, load_settings

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "examples").glob("*/settings*.toml"))
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with prompt files and a model folder that passes all checks short of loading it."""
    for name in ("train.jsonl", "validation.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("{}")
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "model.safetensors"):
        (policy / name).write_text("")
    return tmp_path


def settings_with(folder: Path, changes: dict[str, Any]) -> Settings:
    values: dict[str, dict[str, Any]] = {
        "policy": {"path": folder / "policy"},
        "prompts": {split: folder / f"{split}.jsonl" for split in ("train", "validation", "test")},
        "reward": {"function": "exact_match"},
    }
    for name, value in changes.items():
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    return build_settings(values)


def problems(folder: Path, changes: dict[str, Any]) -> list[str]:
    try:
        check_settings(settings_with(folder, changes))
    except SettingsError as error:
        return str(error).splitlines()
    return []


def test_defaults_are_possible(folder: Path) -> None:
    assert problems(folder, {}) == []


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("run.seed", 0),
        ("rollout.prompts_per_step", 1),
        ("rollout.group_size", 2),
        ("rollout.max_response_tokens", 1),
        ("prompts.max_tokens", 1),
        ("prompts.validation_limit", 1),
        ("prompts.validation_temperature", 0),
        ("reward.max_concurrency", 1),
        ("trainer.steps", 1),
        ("trainer.minibatches", 1),
        ("trainer.validate_every", 0),
        ("trainer.checkpoint_every", 0),
        ("trainer.keep_checkpoints", 1),
        ("trainer.canary_prompts", 1),
        ("optimizer.micro_batch_tokens", 1),
        ("optimizer.warmup_steps", 0),
        ("optimizer.clip_grad", 0),
        ("optimizer.weight_decay", 0),
        ("optimizer.num_threads", 1),
        ("vllm.num_threads", 1),
        ("vllm.max_num_seqs", 1),
        ("vllm.max_num_batched_tokens", 1),
        ("algorithm.kl_coefficient", 0),
        ("algorithm.kl_horizon", 1),
        ("metrics.log_val_generations", 0),
        ("health.every", 1),
    ],
)
def test_least_values_are_taken_and_smaller_ones_refused(folder: Path, name: str, least: int) -> None:
    assert problems(folder, {name: least}) == []
    (line,) = problems(folder, {name: least - 1})
    assert name in line
    assert f"found {least - 1}" in line
    assert f"at least {least}" in line


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.learning_rate",
        "rollout.temperature",
        "rollout.deadline_s",
        "rollout.start_deadline_s",
        "correction.cap",
        "vllm.gpu_memory_utilization",
        "vllm.kv_cache_gib",
        "reward.timeout_s",
        "trainer.proof_tolerance",
    ],
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_values_that_must_be_above_zero(folder: Path, name: str, value: float) -> None:
    assert problems(folder, {name: 0.5}) == []
    (line,) = problems(folder, {name: value})
    assert line.startswith(f"{name} must be above 0")
    assert f"found {value:g}" in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout.top_p": 1.5}, "rollout.top_p must be at most 1; found 1.5."),
        (
            {"trainer.target": {"value": 0.5}, "prompts.validation": None},
            "trainer.target needs prompts.validation, whose results it judges. Set it, or leave trainer.target out.",
        ),
        (
            {"trainer.stop_when_no_better": 3, "prompts.validation": None},
            "trainer.stop_when_no_better needs prompts.validation, whose results it judges. Set it, or leave "
            "trainer.stop_when_no_better out.",
        ),
        (
            {"optimizer.dtype": "float16"},
            'optimizer.dtype: must be float32 | bfloat16; found \'float16\'. Parameter dtype: "float32", or "bfloat16" '
            "with float32 master weights.",
        ),
        (
            {"rollout.prompts_per_step": 10, "trainer.minibatches": 4},
            "rollout.prompts_per_step = 10 must be a multiple of trainer.minibatches = 4, so that every mini-batch has "
            "the same number of groups.",
        ),
        (
            {"prompts.max_tokens": 4000, "rollout.max_response_tokens": 97},
            "prompts.max_tokens = 4000 and rollout.max_response_tokens = 97 add up to 4097 tokens, more than the "
            "model's positions = 4096. Lower one of them.",
        ),
        (
            {"vllm.max_model_len": 2047},
            "prompts.max_tokens = 1024 (default) and rollout.max_response_tokens = 1024 (default) add up to 2048 "
            "tokens, more than vllm.max_model_len = 2047. Lower one of them.",
        ),
    ],
)
def test_impossible_values_are_refused(folder: Path, changes: dict[str, Any], says: str) -> None:
    assert problems(folder, changes) == [says]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.prompts_per_step": 12, "trainer.minibatches": 4},
        {"prompts.max_tokens": 4000, "rollout.max_response_tokens": 96},
        {"vllm.max_model_len": 2048},
        {"optimizer.dtype": "bfloat16"},
    ],
)
def test_values_at_the_edge_are_possible(folder: Path, changes: dict[str, Any]) -> None:
    assert problems(folder, changes) == []


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rollout.top_p": 0.9}, "rollout.top_p = 0.9 needs rollout.top_k"),
        ({"rollout.top_k": 1}, "rollout.top_k = 1 must be at least 2, or none"),
        ({"rollout.top_k": 8, "distillation.texts": "answer"}, "do not work with [distillation]"),
    ],
)
def test_truncated_distributions_that_cannot_be_replayed(folder: Path, changes: dict[str, Any], wanted: str) -> None:
    assert [line for line in problems(folder, changes) if wanted in line]
    assert problems(folder, {"rollout.top_p": 0.9, "rollout.top_k": 10}) == []


@pytest.mark.parametrize(
    ("name", "misspelt", "meant"),
    [
        ("algorithm.advantage", "drgrpo", "dr_grpo"),
        ("algorithm.policy_loss", "ppo-clip", "ppo_clip"),
        ("algorithm.session_rule", "eech", "each"),
        ("algorithm.aggregation", "seq-mean-token-sums", "seq-mean-token-sum"),
        ("algorithm.kl_estimator", "k33", "k3"),
        ("rollout.engine", "transformer", "transformers"),
        ("rollout.loop", "singleturn", "single_turn"),
    ],
)
def test_names_that_are_not_known(folder: Path, name: str, misspelt: str, meant: str) -> None:
    (line,) = problems(folder, {name: misspelt})
    assert line.startswith(f"{name} = {misspelt!r} is not known; known: ")
    assert line.endswith(f" Did you mean {meant!r}?")
    assert problems(folder, {name: meant}) == []


def test_everything_wrong_is_said_at_once(folder: Path) -> None:
    (folder / "test.jsonl").unlink()
    changes = {"run.name": "", "rollout.loop": "x", "rollout.top_k": 1, "policy.path": folder / "other"}
    lines = problems(folder, changes)
    assert [line.split()[0].rstrip(":") for line in lines] == [
        "rollout.top_k",
        "run.name",
        "rollout.loop",
        "prompts.test",
        "policy.path",
    ]


def test_wrong_types_and_values_out_of_bounds_are_said_at_once(folder: Path) -> None:
    lines = problems(folder, {"trainer.steps": 0, "run.seed": -1, "rollout.deadline_s": "long"})
    assert [line.split()[0].rstrip(":") for line in lines] == ["run.seed", "rollout.deadline_s", "trainer.steps"]


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 9,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "qwen3"},
            "architecture GPT2LMHeadModel is not supported",
        ),
        (
            {
                "output_router_logits": True,
                "router_aux_loss_coef": 0.1,
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
            },
            "requests an auxiliary router loss",
        ),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_models_that_cannot_be_trained(folder: Path, change: dict[str, Any], says: str) -> None:
    assert list(trainable_problems(settings_with(folder, {}))) == []
    write_config(folder / "policy", **change)
    (found,) = trainable_problems(settings_with(folder, {}))
    assert found.startswith("policy.path: ")
    assert says in found


def write_config(folder: Path, **change: Any) -> None:
    config = {name: value for name, value in {**CONFIG, **change}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "layout", "says"),
    [
        ({}, {"ranks": 2, "expert": 2}, ["parallel.expert = 2 needs a mixture of experts; this policy is dense"]),
        (
            MIXTURE,
            {"ranks": 8, "tensor": 2, "expert": 4},
            [
                "parallel.tensor = 2 must divide the policy's num_key_value_heads = 1",
                "parallel.expert = 4 must divide the policy's num_experts = 6; possible values: 1, 2, 3, 6",
                "parallel.expert_tensor = 2 must divide the policy's moe_intermediate_size = 9",
                "parallel.sequence must be true for a mixture of experts with tensor = 2",
            ],
        ),
        (MIXTURE, {"ranks": 3, "expert": 2}, ["parallel.ranks = 3 must be a multiple of expert_tensor * expert"]),
        (MIXTURE, {"ranks": 3, "tensor": 2}, []),  # impossible for any policy: reported by the check of values
        (MIXTURE, {"ranks": 6, "expert": 6}, []),
    ],
)
def test_layouts_that_do_not_fit_are_told_by_setting_all_at_once(
    folder: Path, change: dict[str, Any], layout: dict[str, int], says: list[str]
) -> None:
    write_config(folder / "policy", **change)
    changes = {f"parallel.{name}": size for name, size in layout.items()}
    found = list(trainable_problems(settings_with(folder, changes)))
    assert len(found) == len(says)
    assert all(line.startswith(start) for line, start in zip(found, says, strict=True))


def test_a_critic_of_its_own_must_fit_the_layout_too(folder: Path) -> None:
    shutil.copytree(folder / "policy", folder / "critic")
    write_config(folder / "policy", **MIXTURE)
    layout = {"parallel.ranks": 2, "parallel.expert": 2, "critic.path": folder / "critic"}
    assert list(trainable_problems(settings_with(folder, layout))) == []
    (found,) = trainable_problems(settings_with(folder, {**layout, "algorithm.advantage": "gae"}))
    assert found.startswith("parallel.expert = 2 needs a mixture of experts")
    assert found.endswith(f"(This concerns critic.path, {folder / 'critic'}.)")


def test_learner_options_that_the_layout_or_the_policy_has_no_use_for_are_told(folder: Path) -> None:
    options = {
        "optimizer.overlap_grad_reduce": True,
        "optimizer.overlap_param_gather": True,
        "optimizer.recompute": "selective",
        "optimizer.recompute_modules": ("moe",),
    }
    gathers, recomputes = trainable_problems(settings_with(folder, options))
    assert gathers.startswith("optimizer.overlap_param_gather needs parallel.distributed_optimizer = true")
    assert recomputes.startswith('optimizer.recompute_modules has "moe", but no layer of this policy has a mixture')
    write_config(folder / "policy", **MIXTURE)
    assert list(trainable_problems(settings_with(folder, {**options, "parallel.distributed_optimizer": True}))) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"health.thresholds": {"kl_hig.max": 0.1}},
            "health.thresholds: there is no threshold 'kl_hig.max'; the nearest",
        ),
        ({"health.thresholds": {"kl_high.max": float("nan")}}, "health.thresholds: kl_high.max must be a number"),
        ({"health.off": ["memry"]}, "health.off: there is no health rule 'memry'; the nearest is 'memory'"),
        (
            {"health.pause_on": ["critcal"]},
            "health.pause_on: there is no health rule 'critcal'; the nearest is 'critical'",
        ),
        ({"health.pause_on": ["memory"], "health.off": ["memory"]}, "Remove it from one of them"),
        ({"health.pause_on": ["memory"], "health.enabled": False}, "health.pause_on needs health.enabled"),
    ],
)
def test_health_settings_that_cannot_be(folder: Path, changes: dict[str, Any], said: str) -> None:
    (line,) = problems(folder, changes)
    assert said in line


def test_health_settings_that_can_be(folder: Path) -> None:
    changes = {"thresholds": {"kl_high.max": 0.1}, "off": ["memory"], "pause_on": ["critical", "reward_zero"]}
    assert problems(folder, {f"health.{name}": value for name, value in changes.items()}) == []


def test_several_greedy_responses_to_a_problem_would_be_one(folder: Path) -> None:
    assert problems(folder, {"prompts.validation_samples": 1}) == []
    several = {"prompts.validation_samples": 4, "rollout.temperature": 0.7}
    assert problems(folder, {**several, "prompts.validation_temperature": 0.6}) == []
    (line,) = problems(folder, several)
    assert line.startswith("prompts.validation_samples = 4 with prompts.validation_temperature = 0 gives")
    assert "Set prompts.validation_temperature = 0.7, as in training, or prompts.validation_samples = 1." in line
    (line,) = problems(folder, {"prompts.validation_samples": 0})
    assert line == "prompts.validation_samples must be at least 1; found 0."


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_impossible_temperatures_are_refused(folder: Path, value: float) -> None:
    (line,) = problems(folder, {"prompts.validation_temperature": value})
    assert line.startswith("prompts.validation_temperature must be")
    assert line.endswith(f"found {value}.")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_shipped_settings_lack_nothing_but_the_prepared_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lacking = refusal(check_settings, load_settings(path, [], {})) or ""
    files = r"(prompts\.|policy\.path: |distillation\.teachers\.).*(prepared|models/)"
    assert [line for line in lacking.splitlines() if not re.match(files, line)] == []
