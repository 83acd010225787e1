"""Inputs of a run with invented prompts, for its plan."""

from types import SimpleNamespace
from typing import Any

from rl_trainer_parts.rollouts.inputs import Inputs


class InventedPrompts(list[Any]):
    """A number of empty prompts in plain text."""

    longest = 0
    num_dropped = 0
    num_images = 0

    def __init__(self, count: int) -> None:
        super().__init__([SimpleNamespace(messages=())] * count)


def invented_inputs(train: int, *, validation: int = 0, test: int = 0) -> Inputs:
    """Inputs with these numbers of prompts."""
    splits: Any = {"train": train, "validation": validation, "test": test}
    tokenizer: Any = None
    return Inputs(tokenizer=tokenizer, **{name: InventedPrompts(count) for name, count in splits.items()})
