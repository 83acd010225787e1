"""Which matrices of a policy an adapter changes, by its config.json and the [lora] options; without torch."""

import math
from fnmatch import fnmatchcase

from rl_core.errors import SettingsError
from rl_core.weights import LORA_A, LORA_B
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import Shape, tensor_shapes
from rl_distill.options import LoraOptions

ALL_LINEAR = "all-linear"
_WEIGHT = ".weight"


def adapted_modules(config: PolicyConfig, options: LoraOptions) -> dict[str, Shape]:
    """The matrices that an adapter changes: [out, in] by Hugging Face's name, such as "model.layers.0.mlp.up_proj".

    Args:
        config: The policy.
        options: Rank 0 adapts none.

    Raises:
        SettingsError: A pattern matches no matrix that an adapter can change; says what there is.
    """
    if not options.rank:
        return {}
    matrices = _adaptable(config)
    problems = [_problem(pattern, config, matrices) for pattern in options.target_modules]
    if found := [problem for problem in problems if problem is not None]:
        raise SettingsError("\n".join(found))
    patterns = options.target_modules
    return {name: shape for name, shape in matrices.items() if any(_matches(name, pattern) for pattern in patterns)}


def adapter_shapes(config: PolicyConfig, options: LoraOptions) -> dict[str, Shape]:
    """Shape of every A [rank, in] and B [out, rank] by peft's name without its prefix; {} where all weights train.

    Raises:
        SettingsError: As `adapted_modules`.
    """
    shapes: dict[str, Shape] = {}
    for name, (outputs, inputs) in adapted_modules(config, options).items():
        shapes[name + LORA_A] = (options.rank, inputs)
        shapes[name + LORA_B] = (outputs, options.rank)
    return shapes


def adapter_size(config: PolicyConfig, options: LoraOptions) -> int:
    """Elements of all A and B: the trained parameters; times the bytes of the policy's dtype, an update's tensors.

    Raises:
        SettingsError: As `adapted_modules`.
    """
    return sum(map(math.prod, adapter_shapes(config, options).values()))


def _adaptable(config: PolicyConfig) -> dict[str, Shape]:
    """Matrices that an adapter can change: of a mixture those of attention, else all of the layers."""
    parent = ".self_attn." if config.mixture is not None else "."
    return {
        name.removesuffix(_WEIGHT): shape
        for name, shape in tensor_shapes(config).items()
        if name.endswith("_proj.weight") and parent in name
    }


def _matches(name: str, pattern: str) -> bool:
    return pattern == ALL_LINEAR or fnmatchcase(f".{name}", f"*.{pattern}")


def _problem(pattern: str, config: PolicyConfig, matrices: dict[str, Shape]) -> str | None:
    """Why a pattern cannot be; None where it matches something."""
    if any(_matches(name, pattern) for name in matrices):
        return None
    tensors = [name.removesuffix(_WEIGHT) for name in [*tensor_shapes(config), *config.tied]]
    others = [name for name in tensors if _matches(name, pattern)]
    whose = "attention's in a mixture of experts" if config.mixture is not None else "the layers' matrices"
    why = f"{others[0]} takes no adapter, only {whose} do" if others else "it matches nothing"
    ends = sorted({name.split(".", 3)[3] for name in matrices})
    return f"target_modules has {pattern!r}: {why}. Choose among {', '.join(ends)}, or {ALL_LINEAR!r}."
