"""Reads prompt files, and checks and tokenizes their rows."""

from rl_rollout.prompts.prompt_set import PromptOptions, PromptSet, load_prompts
from rl_rollout.prompts.rows import Rows, open_rows
from rl_rollout.prompts.schema import Problem
from rl_rollout.prompts.source import PromptSource, PromptSupply
from rl_rollout.prompts.tokenizer import PromptTokenizer

__all__ = [
    "Problem",
    "PromptOptions",
    "PromptSet",
    "PromptSource",
    "PromptSupply",
    "PromptTokenizer",
    "Rows",
    "load_prompts",
    "open_rows",
]
