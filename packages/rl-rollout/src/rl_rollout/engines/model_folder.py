"""What an engine reads from a Hugging Face folder, without loading the model."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rl_core.errors import EngineError
from rl_core.weights import WeightUpdate

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor by Hugging Face name."""


def require_model_folder(model_dir: Path) -> None:
    """Refuse a folder that holds no model.

    Raises:
        EngineError: config.json or the safetensors files are missing.
    """
    if not (model_dir / "config.json").is_file():
        raise EngineError(f"a model folder has a config.json; found none in {model_dir}.")
    if not any(model_dir.glob("*.safetensors")):
        raise EngineError(
            f"a model folder has *.safetensors files; found none in {model_dir}. Other formats can run code when they "
            "are read: convert them with transformers' save_pretrained."
        )


def end_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Tokens with which the model ends a response: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        file = model_dir / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()


def max_positions(model_dir: Path) -> int:
    """Most tokens that the model's positions allow.

    Raises:
        EngineError: config.json does not say.
    """
    config = json.loads((model_dir / "config.json").read_text())
    found = config.get("text_config", config).get("max_position_embeddings")
    if not isinstance(found, int):
        raise EngineError(f"{model_dir / 'config.json'} has no max_position_embeddings. Set max_model_len.")
    return found


def tensor_shapes(model_dir: Path) -> Shapes:
    """Shapes of the folder's tensors, from the files' headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118 - not a mapping
    return shapes


def check_update(update: WeightUpdate, tensors: Mapping[str, Any], expected: Shapes) -> None:
    """Refuse an update that would leave the model half replaced, before anything is touched.

    Args:
        update: What was published.
        tensors: What arrived; each with a `shape`.
        expected: The model's tensors; tied names may be left out of the update.

    Raises:
        EngineError: A tensor is missing, unknown, or of another shape.
    """
    missing = set(expected) - set(tensors) - set(update.tied)
    if missing:
        raise EngineError(f"a weight update must hold every tensor of the model; {_some(missing)} missing.")
    unknown = set(tensors) - set(expected) - set(update.tied)
    if unknown:
        raise EngineError(f"a weight update must hold only tensors of the model; found {_some(unknown)} beside them.")
    for name, tensor in tensors.items():
        if name in expected and tuple(tensor.shape) != expected[name]:
            raise EngineError(
                f"tensor {name!r} must have the model's shape {list(expected[name])}; found {list(tensor.shape)}."
            )


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first!r}" + (f" and {len(others)} more" if others else "")
