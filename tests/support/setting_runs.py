"""Inputs and base settings of the runs that try every setting."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_run import example_module, make_tiny_policy

from rl_sync_trainer.sft.settings import SftSettings
from rl_trainer_parts.settings.fields import setting_fields

BASE: Mapping[str, Any] = {
    "run.directory": "{folder}/runs",
    "policy.path": "{folder}/policy",
    "prompts.train": "{folder}/train.jsonl",
    "prompts.validation": "{folder}/validation.jsonl",
    "prompts.test": "{folder}/test.jsonl",
    "prompts.max_tokens": 8,
    "reward.function": "{folder}/reward.py:reward",
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_response_tokens": 4,
    "rollout.audit_share": 1.0,
    "trainer.steps": 1,
    "trainer.validate_every": 1,
    "trainer.checkpoint_every": 1,
    "metrics.console": "lines",
}
OF_SFT: Mapping[str, Any] = {"sft.columns": ["prompt", "text"], "sft.batch_size": 2}
OF_ASYNC: Mapping[str, Any] = {"roles.placement": "inline", "schedule.max_staleness": 0}

REWARD = '''"""Rewards that depend on the response, and others."""

import time
from pathlib import Path


def reward(sample):
    return len(sample.response_text) % 3 / 2


def scaled(sample, *, scale=1.0):
    return scale * reward(sample)


def constant(sample):
    return 1.0


def hanging(sample):
    """Wait until the run is found to hang."""
    for _ in range(600 if sample.response_text else 0):  # the check before the run has an empty response
        if (Path(__file__).parent / "runs" / "run" / "hang.json").exists():
            break
        time.sleep(0.05)
    return 1.0
'''


MIXTURE: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make_inputs(folder: Path) -> None:
    """Write models, prompts and rewards."""
    if (folder / "policy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = example_module("prepare").make_tokenizer()
    tokenizer.chat_template += "{{ suffix }}{{ strftime_now(stamp) if stamp }}"
    for name, seed in (("policy", 0), ("teacher", 1)):
        make_tiny_policy(folder / name, tokenizer, seed=seed)
    make_like(folder, "deep", num_hidden_layers=4, layer_types=["full_attention"] * 4)
    make_like(folder, "mixture", **MIXTURE)
    make_stranger(folder / "stranger", folder / "teacher")
    for split, count in (("train", 6), ("validation", 3), ("test", 2)):
        write_prompts(folder / f"{split}.jsonl", count)
    write_prompts(folder / "unanswered.jsonl", 6, without=("answer",))
    write_prompts(folder / "uneven.jsonl", 6, longest="1+1+1+1+1+1=")
    (folder / "reward.py").write_text(REWARD)


def make_like(folder: Path, name: str, **config: Any) -> None:
    """Write a policy whose configuration differs; its weights are never read."""
    shutil.copytree(folder / "policy", folder / name)
    path = folder / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def make_stranger(folder: Path, like: Path) -> None:
    """Write a teacher whose tokenizer has other ids."""
    shutil.copytree(like, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary.values())
    content["model"]["vocab"] = {token: index if index < 2 else 2 + last - index for token, index in vocabulary.items()}
    path.write_text(json.dumps(content))


def write_prompts(path: Path, count: int, *, without: Sequence[str] = (), longest: str | None = None) -> None:
    """Write prompts with answers, data sources and a teacher's texts."""
    rows = [
        {"prompt": f"{number}+{number + 1}=", "answer": "3", "data_source": f"of_{number % 2}", "text": str(number)}
        | {"level": f"of_{number // 2 % 2}", "kind": str((number + 1) % 3)}
        for number in range(count)
    ]
    if longest is not None:
        rows[0]["prompt"] = longest
    kept = [{name: value for name, value in row.items() if name not in without} for row in rows]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))


def words_of(trainer: str, folder: Path, changes: Mapping[str, Any], verb: str = "train") -> list[str]:
    """Return a command with settings; "sft" is a command of the synchronous trainer."""
    base = {name: value for name, value in BASE.items() if trainer != "sft" or name in setting_fields(SftSettings)}
    verb = "sft" if trainer == "sft" else verb
    chosen = {**base, **{"async": OF_ASYNC, "sft": OF_SFT}.get(trainer, {}), **changes}
    return [verb, *(f"--{name}={written(value, folder)}" for name, value in chosen.items())]


def written(value: Any, folder: Path) -> str:
    """Return a value as on the command line."""
    if isinstance(value, str):
        return value.replace("{folder}", str(folder))
    return "none" if value is None else json.dumps(value)
