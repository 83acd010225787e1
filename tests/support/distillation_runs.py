"""A tiny run with two teachers, routed by data source, and what they must say by transformers' own models."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tiny_run import TinyRun, make_tiny_run

SOURCES = ("even", "odd")
"""Data source of each problem, by its row."""

KILLING_REWARD = '''"""Share of even digits; at a given call it kills every teacher."""

import os
import re
import signal
from pathlib import Path

KILL_AT = {kill_at}
LOGS = Path("{logs}")
count = 0


def reward(sample):
    global count
    count += 1
    if count == KILL_AT:
        for log in LOGS.glob("*/*.log"):
            os.kill(int(re.search(r"pid[ =:]+(\\d+)", log.read_text()).group(1)), signal.SIGKILL)
    text = sample.response_text
    return sum(character in "02468" for character in text) / max(len(text), 1)
'''


def make_distillation_run(folder: Path) -> TinyRun:
    """A tiny run whose problems have two sources, with the models `teacher-even` and `teacher-odd` beside it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = make_tiny_run(folder)
    table = pq.read_table(folder / "train.parquet")
    sources = pa.array([SOURCES[row % 2] for row in range(len(table))])
    table = table.set_column(table.column_names.index("data_source"), "data_source", sources)
    pq.write_table(table, folder / "train.parquet")
    for seed, source in enumerate(SOURCES, start=1):
        make_teacher(folder / f"teacher-{source}", like=folder / "policy", seed=seed)
    return run


def make_teacher(folder: Path, *, like: Path, seed: int) -> None:
    """Another model with the same configuration and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like)).float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)


def teacher_tables(folder: Path, **engines: str) -> dict[str, dict[str, Any]]:
    """Settings of the two teachers, with an engine each."""
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
    """A value as on the command line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {as_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


def expected_logprobs(model: Path, input_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[T, V] logprobs by transformers, of each token from those before it; row 0 is 0."""
    import torch

    with torch.no_grad():
        logits = _loaded(model)(torch.from_numpy(input_ids.astype(np.int64))[None]).logits
    found = torch.log_softmax(logits[0, :-1].double(), dim=-1).numpy()
    return np.concatenate([np.zeros_like(found[:1]), found])


@lru_cache
def _loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model).float()
