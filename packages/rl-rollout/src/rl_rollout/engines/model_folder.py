"""Reads an engine's inputs from a Hugging Face folder, without loading the model."""

from pathlib import Path
from typing import Any

from rl_core.errors import EngineError, RLError
from rl_core.files import preview, read_json_object, read_safetensors_header
from rl_core.record_fields import converts_arguments

_HEADS_AND_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_labels"),
)
MAX_SIZES = dict.fromkeys(_HEADS_AND_EXPERTS, 1 << 16) | {"num_hidden_layers": 4096, "hidden_size": 1 << 20}
MAX_SIZES |= {"intermediate_size": 1 << 24, "moe_intermediate_size": 1 << 24, "vocab_size": 1 << 26}
MAX_SIZES |= {"max_position_embeddings": 1 << 40}
"""Upper limits of config.json. Libraries create a module per layer and expert before they read weights."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Settings of the processor of images."""

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Keys that name `owner/repository`, from which transformers downloads and runs code."""


def require_model_folder(model_dir: Path) -> None:
    """Check that the folder contains a model, and no files that are unsafe to open.

    Raises:
        EngineError: config.json or the safetensors files are missing, truncated or invalid.
    """
    if not (model_dir / "config.json").is_file():
        raise EngineError(f"a model folder must contain config.json; found none in {model_dir}.")
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"a model folder must contain *.safetensors files; found none in {model_dir}. Other formats can run code "
            "when loaded: convert them with transformers' save_pretrained."
        )
    for file in files:
        read_safetensors_header(file, error=EngineError)
    check_config(model_dir / "config.json", error=EngineError)
    for name in ("generation_config.json", "model.safetensors.index.json"):
        _read(model_dir / name)


@converts_arguments
def takes_images(model_dir: Path) -> bool:
    """Return True if the folder has a model that takes images, with its image processor."""
    if not any((model_dir / name).is_file() for name in PROCESSOR_FILES) or not (model_dir / "config.json").is_file():
        return False
    return "vision_config" in read_json_object(model_dir / "config.json", error=EngineError)


def check_config(file: Path, *, error: type[RLError]) -> None:
    """Refuse a config.json that would make a library exceed the machine's memory, or run foreign code."""
    config = read_json_object(file, error=error)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, most in MAX_SIZES.items():
            size = part.get(name)
            if size is not None and (type(size) is not int or not 0 <= size <= most):
                raise error(f"{file} must have {name} from 0 to {most}; found {preview(size)}.")
        for name in KERNELS:
            if "/" in str(part.get(name)):
                raise error(
                    f"{file} must have {name} without a repository, whose code would be downloaded and run; found "
                    f"{preview(part[name])}. Remove it."
                )


def has_tokenizer(model_dir: Path) -> bool:
    """Return True if the folder has a tokenizer vocabulary."""
    return any((model_dir / name).is_file() for name in VOCABULARY_FILES) or any(model_dir.glob("*.tiktoken"))


@converts_arguments
def end_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return the tokens that end a response: the model's, and the end token of its tokenizer if the model names any.

    Raises:
        EngineError: A file cannot be read, or names an invalid token.
    """
    named, own = model_end_tokens(model_dir), tokenizer_end_token(model_dir)
    return named if own is None or not named or own in named else (*named, own)


@converts_arguments
def model_end_tokens(model_dir: Path) -> tuple[int, ...]:
    """Return the model's end tokens, from generation_config.json if it names any, else from config.json.

    Raises:
        EngineError: A file cannot be read, or names an invalid token.
    """
    for name in ("generation_config.json", "config.json"):
        tokens = _read(model_dir / name).get("eos_token_id")
        if tokens is not None:
            tokens = tokens if isinstance(tokens, list) else [tokens]
            if any(type(token) is not int for token in tokens):
                raise EngineError(f"{model_dir / name} must have integers as eos_token_id; found {preview(tokens)}.")
            return tuple(tokens)
    return ()


@converts_arguments
def tokenizer_end_token(model_dir: Path) -> int | None:
    """Return the end token that the tokenizer's files name, by its id there; None without one.

    Raises:
        EngineError: A file cannot be read.
    """
    config, special = (_read(model_dir / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    token = config.get("eos_token", special.get("eos_token"))
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    named = config.get("added_tokens_decoder")
    ids = {str(one.get("content")): int(at) for at, one in named.items()} if isinstance(named, dict) else {}
    if text not in ids:
        whole = _read(model_dir / "tokenizer.json")
        vocabulary = whole.get("model", {}).get("vocab")
        if isinstance(vocabulary, dict) and isinstance(vocabulary.get(text), int):
            ids[text] = vocabulary[text]
        ids |= {str(one.get("content")): int(one["id"]) for one in whole.get("added_tokens") or ()}
    return ids.get(text)


@converts_arguments
def max_positions(model_dir: Path) -> int:
    """Return the maximum sequence length that the model's positions allow, in tokens.

    Raises:
        EngineError: config.json does not state it.
    """
    return _size(model_dir, "max_position_embeddings", advice=" Set max_model_len.")


@converts_arguments
def vocabulary_size(model_dir: Path) -> int:
    """Return the size of the model's vocabulary.

    Raises:
        EngineError: config.json does not state it.
    """
    return _size(model_dir, "vocab_size")


def _size(model_dir: Path, name: str, *, advice: str = "") -> int:
    """Return a size of the text model, also for models with other inputs."""
    config = read_json_object(model_dir / "config.json", error=EngineError)
    text = config.get("text_config", config)
    size = text.get(name) if isinstance(text, dict) else None
    if type(size) is not int or not 1 <= size <= MAX_SIZES[name]:
        raise EngineError(f"{model_dir / 'config.json'} has no {name}.{advice}")
    return size


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    return read_json_object(file, error=EngineError) if file.exists() else {}
