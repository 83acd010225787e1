"""Inputs of a run with invented prompts, for its plan, and sizes of an invented model."""

from types import SimpleNamespace
from typing import Any

from rl_trainer_parts.rollouts.inputs import Inputs

TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
"""Sizes of a config.json."""


class InventedPrompts(list[Any]):
    """A number of empty prompts in plain text."""

    longest = 0
    num_dropped = 0
    num_images = 0
    num_unplaced = 0

    def __init__(self, count: int) -> None:
        super().__init__([SimpleNamespace(messages=())] * count)


def invented_inputs(train: int, *, validation: int = 0, test: int = 0) -> Inputs:
    """Inputs with these numbers of prompts."""
    splits: Any = {"train": train, "validation": validation, "test": test}
    tokenizer: Any = SimpleNamespace(sees_images=False)
    return Inputs(tokenizer=tokenizer, **{name: InventedPrompts(count) for name, count in splits.items()})
