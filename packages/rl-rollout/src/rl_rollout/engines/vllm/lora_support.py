"""Which adapters vLLM can serve of a model; importing this loads no engine."""

import re
from collections.abc import Iterator

from rl_rollout.engines.options import VLLMOptions
from rl_rollout.engines.weight_checks import Shapes

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of a slot that vLLM takes."""
EXPERTS = re.compile(r"\.(experts\.\d+|gate)\.")
"""Parts of a mixture whose adapters vLLM does not serve on CPUs, and peft stores joined."""


def target_modules(options: VLLMOptions, shapes: Shapes) -> tuple[str, ...]:
    """Last parts of the names of the modules that an adapter may change.

    Args:
        options: Its lora_target_modules; none take every linear of the layers, of a mixture the attention's.
        shapes: The model's tensors.
    """
    return options.lora_target_modules or tuple(sorted(_linear_names(shapes)))


def lora_problems(options: VLLMOptions, shapes: Shapes) -> Iterator[str]:
    """What vLLM cannot do of the adapters that are asked for."""
    if options.max_lora_rank < 0 or options.max_lora_rank > LORA_RANKS[-1]:
        yield f"max_lora_rank must be from 0 to {LORA_RANKS[-1]}; found {options.max_lora_rank}."
    known = _linear_names(shapes)
    unknown = sorted(set(options.lora_target_modules) - known) if options.max_lora_rank else []
    if unknown:
        why = " vLLM serves adapters of a mixture's attention alone." if _is_mixture(shapes) else ""
        yield f"lora_target_modules must be among {', '.join(sorted(known))}; found {', '.join(unknown)}.{why}"


def _linear_names(shapes: Shapes) -> set[str]:
    """Last parts of the names of the layers' matrices; of a mixture's, those of its attention."""
    is_mixture = _is_mixture(shapes)
    return {
        name.split(".")[-2]
        for name, shape in shapes.items()
        if len(shape) == 2
        and ".layers." in name
        and name.endswith(".weight")
        and (".self_attn." in name or not is_mixture)
    }


def _is_mixture(shapes: Shapes) -> bool:
    return any(EXPERTS.search(name) for name in shapes)
