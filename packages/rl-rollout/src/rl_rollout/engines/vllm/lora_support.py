"""The adapters that vLLM can serve for a model. Importing this module loads no engine."""

import re
from collections.abc import Iterator, Mapping

from rl_rollout.engines.options import VLLMOptions

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor by Hugging Face name."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks of a slot that vLLM supports."""
EXPERTS = re.compile(r"\.experts\.\d+\.")


def target_modules(options: VLLMOptions, shapes: Shapes) -> tuple[str, ...]:
    """Return the last parts of the names of the modules that an adapter may change.

    vLLM's own choice includes the embeddings and the head, with which it cannot score.

    Args:
        options: Its lora_target_modules. Empty selects every linear layer; for a mixture-of-experts model, only
            attention.
        shapes: The model's tensors.
    """
    return options.lora_target_modules or tuple(sorted(_linear_names(shapes)))


def lora_problems(options: VLLMOptions, shapes: Shapes) -> Iterator[str]:
    """Describe the requested adapters that vLLM does not support.

    Args:
        options: The engine's options.
        shapes: The model's tensors.
    """
    if not 0 <= options.max_lora_rank <= LORA_RANKS[-1]:
        largest = LORA_RANKS[-1]
        yield f"max_lora_rank (lora.rank in a run) must be from 0 to {largest}; found {options.max_lora_rank}."
    known = _linear_names(shapes)
    if unknown := sorted(set(options.lora_target_modules) - known):
        reason = " For a mixture of experts, only attention adapters are supported." if _is_mixture(shapes) else ""
        yield f"lora_target_modules must be among {', '.join(sorted(known))}; found {', '.join(unknown)}.{reason}"


def _linear_names(shapes: Shapes) -> set[str]:
    is_mixture = _is_mixture(shapes)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")]
    return {name.split(".")[-2] for name in matrices if (".self_attn." if is_mixture else ".layers.") in name}


def _is_mixture(shapes: Shapes) -> bool:
    return any(EXPERTS.search(name) for name in shapes)
