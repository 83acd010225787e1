"""Workloads of the learner benchmark: policies by name, and identical batches in every process. Does not need torch."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]

SHARED = ("shared_256_8", "shared_512_16", "trees")
"""Workloads with shared prefixes, which are also compared with our learner computing each row separately."""

WORKLOADS = ("equal", "ragged", *SHARED)
EXPERTS = "experts"
"""Workload of one mixture layer, without a peer: see _learner_experts.py."""

WHOLE_GROUPS = {"shared_512_16": 16 * 768}
"""Tokens of a micro-batch for workloads whose prompts' rows would not fit into the preset's."""

OPTIMIZER: dict[str, Any] = {
    "learning_rate": 1e-5,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "clip_grad": 0.1,
}
"""Options of AdamW on both sides; no weight decay on norms. Gradients are clipped in every step."""

FAMILIES = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
}
"""Fields of config.json by the name of an architecture."""

_SHARED = {
    **FAMILIES["qwen3"],
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A policy and the batches that train it.

    Attributes:
        policy: Sizes, as in Qwen3's config.json.
        dtype: Dtype of the computation; master weights, moments and loss are always float32.
        num_rows: Trajectories per batch.
        shortest: Tokens of the shortest row of `ragged`.
        longest: Tokens of the longest row of `ragged`; rows of `equal` have the mean.
        prompts: Tokens of the shortest and the longest prompt.
        budget: Maximum tokens of a micro-batch, including padding.
        shrink: Divisor of prompts, responses and turns in the shared workloads.
        tolerance: Maximum relative difference of losses and gradient norms.
    """

    policy: dict[str, Any]
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_rows: int
    shortest: int
    longest: int
    prompts: tuple[int, int]
    budget: int
    shrink: int = 1
    tolerance: float = 1e-4
    num_parameters: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Count the parameters."""
        object.__setattr__(self, "num_parameters", num_parameters(self.policy))


def num_parameters(policy: dict[str, Any]) -> int:
    """Number of parameters of a dense Qwen3 or Llama with a tied head; the embedding counts once."""
    hidden, head = policy["hidden_size"], policy["head_dim"]
    heads, groups = policy["num_attention_heads"], policy["num_key_value_heads"]
    norms = 2 * head if policy["model_type"] == "qwen3" else 0
    attention = hidden * head * (2 * heads + 2 * groups) + norms
    layer = attention + 3 * hidden * policy["intermediate_size"] + 2 * hidden
    return int(policy["num_hidden_layers"] * layer + hidden + policy["vocab_size"] * hidden)


PRESETS = {
    "tiny": Preset(
        policy={
            **_SHARED,
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
        },
        num_rows=12,
        shortest=6,
        longest=40,
        prompts=(2, 4),
        budget=160,
        shrink=16,
    ),
    "8m": Preset(
        policy={
            **_SHARED,
            "vocab_size": 8192,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 1024,
        },
        num_rows=32,
        shortest=48,
        longest=512,
        prompts=(16, 32),
        budget=4096,
    ),
    "0.6b": Preset(
        policy={
            **_SHARED,
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
        },
        dtype="bfloat16",
        num_rows=64,
        shortest=192,
        longest=2048,
        prompts=(64, 128),
        budget=8192,
        tolerance=3e-2,
    ),
}
"""Presets by name: for the smoke test, for a CPU, and with Qwen3-0.6B's shape for a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A batch with concatenated rows.

    Attributes:
        input_ids: [T] int32.
        lengths: [N] tokens of each row.
        prompt_lengths: [N] untrained tokens at the start of each row.
        prompts: [N] index of each row's prompt.
    """

    input_ids: NDArray[np.int32]
    lengths: Lengths
    prompt_lengths: Lengths
    prompts: Lengths

    @property
    def offsets(self) -> Lengths:
        """[N + 1] offsets of the rows."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[T] mask, True in the responses."""
        positions = np.arange(len(self.input_ids)) - np.repeat(self.offsets[:-1], self.lengths)
        return np.asarray(positions >= np.repeat(self.prompt_lengths, self.lengths))


def make_rows(preset: Preset, workload: str, *, seed: int) -> Rows:
    """Return a batch of random tokens.

    Args:
        preset: Sizes.
        workload: Rows of `equal` and `ragged` share no prefixes and have the same number of tokens in total; the
            lengths of `ragged` are evenly spread, in random order. `shared_P_G` has 16 responses of 32 to 256 tokens, G
            per prompt of P tokens. `trees` has a prompt of 256 tokens, 4 sessions of 4 turns, and forks of each session
            after its first 3 turns. A turn has 64 tokens.
        seed: Seed of tokens and order.
    """
    random = np.random.default_rng(seed)

    def draw(size: int) -> NDArray[np.int32]:
        return random.integers(0, preset.policy["vocab_size"], size, dtype=np.int32)

    if workload == "trees":
        prompt, turn = draw(256 // preset.shrink), 64 // preset.shrink
        rows = []
        for _ in range(4):
            trunk = np.concatenate([prompt, draw(4 * turn)])
            rows += [trunk, *(np.concatenate([trunk[: len(prompt) + n * turn], draw(turn)]) for n in (1, 2, 3))]
        return _of_rows(rows, [len(prompt)] * len(rows), [0] * len(rows))
    if workload in SHARED:
        _, size, group = workload.split("_")
        lengths = random.permutation(np.linspace(32, 256, 16) / preset.shrink).round().astype(np.int64)
        prompts = [draw(int(size) // preset.shrink) for _ in range(16 // int(group))]
        numbers = [row // int(group) for row in range(16)]
        rows = [np.concatenate([prompts[number], draw(n)]) for number, n in zip(numbers, lengths, strict=True)]
        return _of_rows(rows, [int(size) // preset.shrink] * 16, numbers)
    if workload == "equal":
        lengths = np.full(preset.num_rows, (preset.shortest + preset.longest) // 2)
    else:
        lengths = random.permutation(np.linspace(preset.shortest, preset.longest, preset.num_rows).round())
    lengths = lengths.astype(np.int64)
    ids = draw(int(lengths.sum()))
    prompt_lengths = random.integers(preset.prompts[0], preset.prompts[1] + 1, preset.num_rows)
    return Rows(input_ids=ids, lengths=lengths, prompt_lengths=prompt_lengths, prompts=np.arange(preset.num_rows))


def _of_rows(rows: list[NDArray[np.int32]], prompt_lengths: list[int], prompts: list[int]) -> Rows:
    return Rows(
        input_ids=np.concatenate(rows),
        lengths=np.array([len(row) for row in rows], dtype=np.int64),
        prompt_lengths=np.array(prompt_lengths, dtype=np.int64),
        prompts=np.array(prompts, dtype=np.int64),
    )


def padded_micro_batches(lengths: Lengths, *, budget: int) -> list[Lengths]:
    """Return the rows of each micro-batch, in order: as many as fit when padded to the longest.

    Args:
        lengths: [N] tokens of each row.
        budget: Maximum tokens of a micro-batch, including padding; a longer row gets its own.
    """
    parts: list[list[int]] = []
    longest = 0
    for row, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if parts and (len(parts[-1]) + 1) * longest <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
            longest = length
    return [np.array(part, dtype=np.int64) for part in parts]


def num_padded_tokens(lengths: Lengths, parts: list[Lengths]) -> int:
    """Return the tokens of micro-batches whose rows are padded to the longest."""
    return sum(len(part) * int(lengths[part].max()) for part in parts)
