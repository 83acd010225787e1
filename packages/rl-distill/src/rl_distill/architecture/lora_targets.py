"""Select the matrices that a LoRA adapter changes, from config.json and the [lora] options; without torch."""

import math
import re
from fnmatch import fnmatchcase

from rl_core.errors import SettingsError
from rl_core.weights import LORA_A, LORA_B
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import Shape, tensor_shapes
from rl_distill.architecture.transformers_model import linear_modules, matrix_names
from rl_distill.options import LoraOptions

ALL_LINEAR = "all-linear"
_WEIGHT = ".weight"


def adapted_modules(config: PolicyConfig, options: LoraOptions) -> dict[str, Shape]:
    """Return the [out, in] shape of each adapted matrix by Hugging Face name, such as "model.layers.0.mlp.up_proj".

    Args:
        config: The policy's configuration.
        options: Target modules and rank; rank 0 adapts no matrix.

    Raises:
        SettingsError: A pattern matches no matrix that an adapter can change. The message lists the possible targets.
    """
    if not options.rank:
        return {}
    matrices = _adaptable(config)
    problems = [_problem(pattern, config, matrices) for pattern in options.target_modules]
    if found := [problem for problem in problems if problem is not None]:
        raise SettingsError("\n".join(found))
    patterns = options.target_modules
    return {name: shape for name, shape in matrices.items() if any(_matches(name, pattern) for pattern in patterns)}


def adapted_tensor(module: str, config: PolicyConfig) -> str:
    """Return the folder's name of a module's matrix; a class may name its modules otherwise than its folder does."""
    return matrix_names(config.model_json).get(module, "") if config.model_json else f"{module}{_WEIGHT}"


def all_matrices(config: PolicyConfig) -> list[str]:
    """Return the names of all weights of a policy as peft has them, by module."""
    vision = config.image_token_id is not None
    return [f"{name}{_WEIGHT}" for name in matrix_names(config.model_json)] if vision else list(tensor_shapes(config))


def adapter_shapes(config: PolicyConfig, options: LoraOptions) -> dict[str, Shape]:
    """Return the shape of every A [rank, in] and B [out, rank] by peft's name without its prefix; empty without LoRA.

    Raises:
        SettingsError: A pattern matches no matrix that an adapter can change.
    """
    shapes: dict[str, Shape] = {}
    for name, (outputs, inputs) in adapted_modules(config, options).items():
        shapes[name + LORA_A] = (options.rank, inputs)
        shapes[name + LORA_B] = (outputs, options.rank)
    return shapes


def adapter_size(config: PolicyConfig, options: LoraOptions) -> int:
    """Return the number of elements of all A and B matrices, which are the trained parameters.

    Raises:
        SettingsError: A pattern matches no matrix that an adapter can change.
    """
    return sum(map(math.prod, adapter_shapes(config, options).values()))


def _adaptable(config: PolicyConfig) -> dict[str, Shape]:
    """Return the matrices that an adapter can change: all in the layers, or in a mixture only those of attention."""
    if config.model_json:
        return linear_modules(config.model_json)
    parent = ".self_attn." if config.mixture is not None else "."
    return {
        name.removesuffix(_WEIGHT): shape
        for name, shape in tensor_shapes(config).items()
        if name.endswith("_proj.weight") and parent in name
    }


def _matches(name: str, pattern: str) -> bool:
    return pattern == ALL_LINEAR or fnmatchcase(f".{name}", f"*.{pattern}")


def _problem(pattern: str, config: PolicyConfig, matrices: dict[str, Shape]) -> str | None:
    """Return why a pattern is not a valid target; None if it matches an adaptable matrix."""
    if any(_matches(name, pattern) for name in matrices):
        return None
    tensors = [name.removesuffix(_WEIGHT) for name in [*tensor_shapes(config), *config.tied]]
    others = [name for name in tensors if _matches(name, pattern)]
    whose = "attention matrices of a mixture of experts" if config.mixture is not None else "matrices of the layers"
    why = f"{others[0]} cannot have an adapter; only {whose} can" if others else "it matches no matrix"
    ends = sorted({re.sub(r".*\.\d+\.", "", name) for name in matrices})
    return f"target_modules has {pattern!r}: {why}. Choose among {', '.join(ends)}, or {ALL_LINEAR!r}."
