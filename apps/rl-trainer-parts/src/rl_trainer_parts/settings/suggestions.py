"""Which setting a name stands for that is none."""

import difflib
from collections.abc import Iterable

MAX_SUGGESTIONS = 3
FLAGS = ("dry-run", "replay", "resume")
"""What `train` takes beside settings."""

OF_ASYNC = ("schedule", "roles")
"""Sections that rl-async-trainer has beside those of both trainers."""

OF_ROUTERS = ("aux_loss", "z_loss", "bias_update")
"""Parts of what Megatron and others call losses of a mixture's router, and updates of its bias."""

MIN_LIKENESS = 0.7
"""Of the last parts of two names, or of two sections."""

OTHER_NAMES = {
    "batch_size": "rollout.prompts_per_step",
    "lr": "learner.learning_rate",
    "max_completion_length": "rollout.max_response_tokens",
    "max_prompt_length": "prompts.max_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_steps": "trainer.steps",
    "model": "policy.path",
    "model_path": "policy.path",
    "n_gpus_per_node": "replicas.gpus",
    "num_generations": "rollout.group_size",
    "output_dir": "run.directory",
    "total_training_steps": "trainer.steps",
    "train_batch_size": "rollout.prompts_per_step",
    "train_files": "prompts.train",
    "val_files": "prompts.validation",
}
"""What verl and TRL call settings, by the last part of the name."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'trainer.steps' or 'skip.steps'?"; empty where nothing is near.

    Settings are compared by the last part of their names, then by their section; equals stay in the order of use.

    Args:
        name: What was written.
        known: Names of all settings, in the order of use.
    """
    names = list(known)
    section, _, ending = name.rpartition(".")
    flags = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.8)
    if flags:
        return f" Did you mean --{flags[0]}?"
    if section in OF_ASYNC and not any(one.startswith(f"{section}.") for one in names):
        return f" [{section}] is a section of rl-async-trainer."
    if any(part in ending for part in OF_ROUTERS):
        return " The learners add no loss of a mixture's router, and keep its bias as it was loaded: leave it out."
    likeness = {one: _likeness(ending, one.rpartition(".")[2]) for one in names}
    best = max(likeness.values(), default=0.0)
    found = [one for one in names if likeness[one] == best] if best >= MIN_LIKENESS else []
    if best < 1 and ending in OTHER_NAMES:
        found = [OTHER_NAMES[ending]]
    elif best < 1:  # a section in place of one of its settings
        found = [one for one in names if one.startswith(f"{name}.")] or found
    if section:
        near = [one for one in found if _likeness(section, one.rpartition(".")[0]) >= MIN_LIKENESS]
        own = [one for one in names if one.rpartition(".")[0] == section and likeness[one] >= MIN_LIKENESS]
        found = near or [*sorted(own, key=lambda one: -likeness[one]), *found]
        found.sort(key=lambda one: -_likeness(section, one.rpartition(".")[0]))  # stable: the most used first
    found = found or difflib.get_close_matches(name, names, n=1)
    shown = [repr(one) for one in found[:MAX_SUGGESTIONS]]
    last = shown.pop() if shown else ""
    return f" Did you mean {', '.join(shown)}{' or ' if shown else ''}{last}?" if last else ""


def _likeness(name: str, other: str) -> float:
    """From 0, nothing alike, to 1, equal."""
    return difflib.SequenceMatcher(None, name, other).ratio()
