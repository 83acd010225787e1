"""Plan of benchmarks/gpu.py, by priority: shapes of policies, workloads, groups. Does not need torch."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _learner_workload import PRESETS, WHOLE_GROUPS, Preset, Rows
from _learner_workload import make_rows as rows_of_preset

GIB = 2**30

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def _dense(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    return {**_QWEN3, **sizes, "num_attention_heads": heads}


SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": _dense(1024, 3072, 28, 16),
    "1.7b": _dense(2048, 6144, 28, 16),
    "4b": _dense(2560, 9728, 36, 32),
    "30b-a3b": {
        **_dense(2048, 6144, 8, 32),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
"""config.json of Qwen3's shapes; the mixture has 8 of its 48 layers, because all would not fit on one GPU."""

_TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
_TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def shape_of(name: str, *, is_short: bool) -> dict[str, Any]:
    """Return a policy's config.json; the short form has the same architecture in tiny sizes."""
    shape = SHAPES[name]
    if not is_short:
        return shape
    return {**shape, **_TINY, **_TINY_HEADS, **(_TINY_EXPERTS if "num_experts" in shape else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Rows of a step.

    Attributes:
        prompts: Number of prompts.
        group: Rows per prompt.
        prompt_tokens: Tokens of each prompt.
        response_tokens: Response tokens of each row.
        budget: Maximum number of tokens that a micro-batch computes.
    """

    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int
    budget: int


WORKLOADS = {
    "4k": Workload(prompts=8, group=1, prompt_tokens=128, response_tokens=3968, budget=8192),
    "32k": Workload(prompts=1, group=1, prompt_tokens=128, response_tokens=32640, budget=32768),
    "4k_shared": Workload(prompts=2, group=4, prompt_tokens=2048, response_tokens=2048, budget=10240),
    "32k_shared": Workload(prompts=1, group=4, prompt_tokens=24576, response_tokens=8192, budget=57344),
}
"""By name; `shared_512_16` of the learner benchmark is one more. A micro-batch holds all rows of a shared prompt."""
BOUND = "shared_512_16"
"""The workload that is compared with the maximum gain from sharing, its measurement "bound"."""
_SHRINK = 128
"""Divisor of token counts in the short form."""


def make_rows(workload: str, config: dict[str, Any], *, seed: int, is_short: bool) -> Rows:
    """Return the random tokens of a workload.

    Args:
        workload: A name in `WORKLOADS`, or `BOUND`, or "bound" for the same.
        config: The policy's config.json.
        seed: Seed of the tokens.
        is_short: Use rows of a few tokens.
    """
    if workload in (BOUND, "bound"):
        return rows_of_preset(preset_of(config, workload, is_short=is_short), BOUND, seed=seed)
    of = WORKLOADS[workload]
    divided = _SHRINK if is_short else 1
    num_prompt, num_response = (max(2, tokens // divided) for tokens in (of.prompt_tokens, of.response_tokens))
    random = np.random.default_rng(seed)
    ids = random.integers(0, config["vocab_size"], (of.prompts, of.group, num_prompt + num_response), dtype=np.int32)
    ids[:, :, :num_prompt] = ids[:, :1, :num_prompt]
    num_rows = of.prompts * of.group
    return Rows(
        input_ids=ids.reshape(-1),
        lengths=np.full(num_rows, num_prompt + num_response, dtype=np.int64),
        prompt_lengths=np.full(num_rows, num_prompt, dtype=np.int64),
        prompts=np.repeat(np.arange(of.prompts), of.group),
    )


def preset_of(config: dict[str, Any], workload: str, *, is_short: bool) -> Preset:
    """Return a policy and its batches as a preset of the learner benchmark."""
    budget = WORKLOADS[workload].budget if workload in WORKLOADS else WHOLE_GROUPS[BOUND]
    like = PRESETS["tiny" if is_short else "0.6b"]
    return Preset(
        policy=config,
        dtype="bfloat16",
        num_rows=like.num_rows,
        shortest=like.shortest,
        longest=like.longest,
        prompts=like.prompts,
        budget=budget,
        shrink=like.shrink,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Measurements that one process makes with the same loaded models.

    Attributes:
        name: Name in the report.
        kind: Kind of measurement; see `peers/gpu_side.py`.
        shape: Shape of the policy; empty without one.
        rows: Names of the measurements, by priority.
        least_s: Minimum remaining seconds to start the group.
    """

    name: str
    kind: str
    shape: str = ""
    rows: tuple[str, ...]
    least_s: float = 20.0


_LENGTHS = ("4k", "4k_shared", "32k", "32k_shared")

PLAN = (
    # For the targets.
    Group(name="ours-4b", kind="ours", shape="4b", rows=("4k", BOUND, "bound"), least_s=40),
    Group(name="transformers-4b", kind="transformers", shape="4b", rows=("4k",), least_s=40),
    Group(name="weights-4b", kind="weights", shape="4b", rows=("publish_and_prove", "to_a_process"), least_s=40),
    Group(name="ours-30b-a3b", kind="ours", shape="30b-a3b", rows=_LENGTHS, least_s=45),
    # Every shape at every length, and other measurements.
    Group(name="ours-4b", kind="ours", shape="4b", rows=_LENGTHS[1:], least_s=40),
    Group(name="distillation", kind="distillation", rows=("top_k_forward_kl",)),
    Group(name="ours-0.6b", kind="ours", shape="0.6b", rows=(*_LENGTHS, BOUND, "bound")),
    Group(name="queue", kind="queue", rows=("lease_to_device",)),
    Group(name="transformer-engine-4b", kind="transformer_engine", shape="4b", rows=("4k", "32k"), least_s=40),
    Group(name="megatron-4b", kind="megatron", shape="4b", rows=("4k",), least_s=40),
    Group(name="ours-1.7b", kind="ours", shape="1.7b", rows=_LENGTHS, least_s=30),
    # The peers at other shapes and lengths.
    Group(name="transformers-0.6b", kind="transformers", shape="0.6b", rows=("4k", "32k")),
    Group(name="transformers-1.7b", kind="transformers", shape="1.7b", rows=("4k",), least_s=30),
    Group(name="transformers-30b-a3b", kind="transformers", shape="30b-a3b", rows=("4k",), least_s=40),
    Group(name="transformers-4b", kind="transformers", shape="4b", rows=("32k",), least_s=40),
    Group(name="transformer-engine-0.6b", kind="transformer_engine", shape="0.6b", rows=("4k", "32k")),
    Group(name="megatron-0.6b", kind="megatron", shape="0.6b", rows=("4k", "32k")),
    Group(name="transformer-engine-1.7b", kind="transformer_engine", shape="1.7b", rows=("4k", "32k"), least_s=30),
    Group(name="megatron-1.7b", kind="megatron", shape="1.7b", rows=("4k", "32k"), least_s=30),
)
"""All groups, by priority; the next start continues with those that ten minutes do not reach.

A group that occurs twice has its less important rows in a second process.
"""

SHORT = ("ours-4b", "transformers-4b", "ours-30b-a3b", "weights-4b", "distillation", "queue", "megatron-4b")
"""Groups of the short form: every kind that runs on a CPU."""


LONG_ROWS = {*WORKLOADS, "to_a_process"} - {"4k"}
"""Measurements that the short form skips because they take long and add little."""
LARGE = {
    *(f"transformers-{shape}/32k" for shape in ("0.6b", "4b")),  # computes all logits of a row at once
    *(f"megatron-{shape}/32k" for shape in ("0.6b", "1.7b")),  # as does megatron
    "ours-4b/32k_shared",
}
"""Measurements that need a GPU of `LARGE_BYTES`."""
LARGE_BYTES = 100e9


def plan_of(*, is_short: bool, only: tuple[str, ...] = ()) -> tuple[Group, ...]:
    """Return the groups to run, in order; `only` keeps those whose name contains one of these words."""
    groups = [_shortened(group) for group in PLAN if group.name in SHORT] if is_short else PLAN
    return tuple(group for group in groups if group.rows and (not only or any(word in group.name for word in only)))


def measurable(
    groups: Sequence[Group], *, memory_bytes: int | None, is_short: bool
) -> tuple[tuple[Group, ...], dict[str, str]]:
    """Return what can be measured on a GPU with this memory (None for a CPU), and why the rest cannot."""
    kept, skipped = [], {}
    lacks_engine = importlib.util.find_spec("transformer_engine") is None
    for group in groups:
        if lacks_engine and (group.kind == "transformer_engine" or (group.kind == "megatron" and not is_short)):
            skipped[group.name] = "Transformer Engine is not installed"
            continue
        is_small = memory_bytes is not None and memory_bytes < LARGE_BYTES
        large = [row for row in group.rows if is_small and f"{group.name}/{row}" in LARGE]
        skipped |= {f"{group.name}/{row}": f"it needs a GPU of {LARGE_BYTES / 1e9:g} GB" for row in large}
        rows = tuple(row for row in group.rows if row not in large)
        if rows:
            kept.append(replace(group, rows=rows))
    return tuple(kept), skipped


def _shortened(group: Group) -> Group:
    rows = tuple(row for row in group.rows if row not in LONG_ROWS)
    return replace(group, rows=rows, least_s=0.0)
