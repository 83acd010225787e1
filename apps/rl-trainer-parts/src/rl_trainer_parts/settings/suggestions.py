"""Suggest the setting that an unknown name means."""

import difflib
from collections.abc import Iterable

MAX_SUGGESTIONS = 3
FLAGS = ("dry-run", "replay", "resume")
"""Options of `train` that are not settings."""

OF_ASYNC = ("schedule", "roles")
"""Sections that only rl-async-trainer has."""

OF_ROUTERS = ("aux_loss", "z_loss", "bias_update")
"""Parts of the names that Megatron and others give to a mixture's router losses and bias updates."""

MIN_LIKENESS = 0.7
"""Minimum similarity of the last parts of two names, or of two sections."""

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
"""Names of settings in verl and TRL, by their last part."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'trainer.steps' or 'skip.steps'?"; empty if nothing is similar.

    Names are compared by their last part, then by section; ties keep the order of use.

    Args:
        name: The unknown name.
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
        return " The learners add no router loss and keep the router's bias as loaded: leave it out."
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
    """Similarity from 0 to 1."""
    return difflib.SequenceMatcher(None, name, other).ratio()
