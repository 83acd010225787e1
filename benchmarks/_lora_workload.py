"""Workloads of the LoRA benchmark: a policy of 52 million parameters and its adapter. Does not need torch."""

from typing import Any

from _learner_workload import PRESETS as LEARNER_PRESETS
from _learner_workload import Preset

OURS, FULL, PEFT, MERGED = "ours", "ours_full", "peft", "ours_merged"
TRAIN, RECOMPUTE, DECODE = "train", "train_recompute", "decode"
WORKLOADS = (TRAIN, RECOMPUTE, DECODE)
SYSTEMS = {TRAIN: (OURS, FULL, PEFT), RECOMPUTE: (OURS, FULL, PEFT), DECODE: (OURS, MERGED, FULL)}
"""Systems that take turns. In `decode`, the engine serves an adapter, merged weights, or weights without an adapter."""

_52M: dict[str, Any] = {
    **LEARNER_PRESETS["tiny"].policy,
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
PRESETS = {
    "tiny": LEARNER_PRESETS["tiny"],
    "52m": Preset(policy=_52M, num_rows=16, shortest=128, longest=128, prompts=(1, 1), budget=1024),
}
"""Presets by name: for the smoke test, and for a CPU."""
RANKS = {"tiny": 4, "52m": 16}
"""Rank of the adapter on all linear matrices of the layers; its alpha is twice the rank."""
NUM_SAMPLES, PROMPT_TOKENS = 32, 8
MAX_TOKENS = {"tiny": 4, "52m": 64}
"""Tokens of each response in `decode`."""
POLICY, ADAPTER = "policy", "adapter"
"""Names of the Hugging Face folder and the peft folder."""
