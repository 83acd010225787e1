"""A tiny run with two teachers, routed by data source, and their expected scores from transformers."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tiny_run import TinyRun, example_module, make_tiny_policy, make_tiny_run

SOURCES = ("even", "odd")
"""Data source of each problem, by its row."""


def make_distillation_run(folder: Path, *, all_text: bool = False) -> TinyRun:
    """A tiny run whose problems have two sources, with the models `teacher-even` and `teacher-odd` beside it.

    The policy and the second are dense, the first is a mixture of experts.

    Args:
        folder: Folder of the run.
        all_text: The models' vocabulary is that of the tokenizer.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = make_tiny_run(folder)
    if all_text:
        tokenizer = example_module("prepare").make_tokenizer()
        make_tiny_policy(folder / "policy", tokenizer, vocab_size=len(tokenizer))
    table = pq.read_table(folder / "train.parquet")
    sources = pa.array([SOURCES[row % 2] for row in range(len(table))])
    table = table.set_column(table.column_names.index("data_source"), "data_source", sources)
    pq.write_table(table, folder / "train.parquet")
    for seed, source in enumerate(SOURCES, start=1):
        make_teacher(folder / f"teacher-{source}", like=folder / "policy", seed=seed, is_mixture=source == "even")
    return run


def make_teacher(folder: Path, *, like: Path, seed: int, is_mixture: bool = False) -> None:
    """Write another model with the same configuration and tokenizer, or a mixture of four experts, two per token."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(like, trust_remote_code=False)
    if is_mixture:
        shared = {
            name: value for name, value in config.to_dict().items() if name not in ("architectures", "model_type")
        }
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**shared, **experts)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(like, trust_remote_code=False).save_pretrained(folder)


def teacher_tables(folder: Path, **engines: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the two teachers, with an engine each."""
    return {
        source: {
            "model": str(folder / f"teacher-{source}"),
            "engine": engine,
            "data_sources": [source],
            "num_threads": 1,
            "kv_cache_gib": 0.1,
        }
        for source, engine in engines.items()
    }


def as_toml(value: Any) -> str:
    """Return a value as on the command line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {as_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


def expected_logprobs(model: Path, input_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return transformers' [T, V] logprobs of each token given those before it; row 0 is 0."""
    import torch

    with torch.no_grad():
        logits = _loaded(model)(torch.from_numpy(input_ids.astype(np.int64))[None]).logits
    found = torch.log_softmax(logits[0, :-1].double(), dim=-1).numpy()
    return np.concatenate([np.zeros_like(found[:1]), found])


@lru_cache
def _loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False).float()


def renumber(source: Path, target: Path) -> None:
    """Write the same model with its token ids in reverse order."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tensors = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    size = len(tensors[name])
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: size - 1 - index for token, index in vocab.items()}
    for added in tokenizer.get("added_tokens", []):
        added["id"] = size - 1 - added["id"]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file in ("config.json", "generation_config.json"):
        if (target / file).exists():
            values = json.loads((target / file).read_text())
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if values.get(key) is not None:
                    values[key] = size - 1 - values[key]
            (target / file).write_text(json.dumps(values))
