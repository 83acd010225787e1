"""What an engine reads from a Hugging Face folder, without loading the model."""

import json
from pathlib import Path

from rl_core.errors import EngineError


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
