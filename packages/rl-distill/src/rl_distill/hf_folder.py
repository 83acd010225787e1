"""Hugging Face folders of safetensors: what tensors a policy has, reading and writing them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_core.errors import CheckpointError, DataError
from rl_distill.policy_config import PolicyConfig

_log = structlog.get_logger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files beside the weights that belong to a policy; copied as they are."""

ReadError = type[DataError] | type[CheckpointError]


def tensor_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a policy by Hugging Face name; a tied head is left out."""
    hidden, ffn, head_dim = config.hidden_size, config.ffn_hidden_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_key_value_heads * head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def read_policy_tensors(
    policy_dir: Path, config: PolicyConfig, *, dtype: torch.dtype, error: ReadError = DataError
) -> dict[str, torch.Tensor]:
    """All tensors of a policy from a Hugging Face folder, in one file or in shards.

    Raises:
        DataError: Or the given error: a file or tensor is missing, torn or of another shape.
    """
    files = _weight_files(policy_dir, error)
    tensors: dict[str, torch.Tensor] = {}
    shapes = tensor_shapes(config)
    for path in files:
        tensors.update(read_tensors(path, {}, dtype=dtype, error=error))
    extra = sorted(tensors.keys() - shapes.keys() - config.tied.keys())
    if extra:
        _log.warning("tensors_ignored", policy_dir=str(policy_dir), num_tensors=len(extra), first=extra[0])
    check_tensors(files[0] if len(files) == 1 else policy_dir, tensors, shapes, error)
    return {name: tensors[name] for name in shapes}


def read_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype, error: ReadError = CheckpointError
) -> dict[str, torch.Tensor]:
    """Tensors of one safetensors file; all of them, or those of `shapes`, which then must all be there.

    Raises:
        CheckpointError: Or the given error: the file is missing or torn, or a tensor missing or of another shape.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not shapes or name in shapes]  # noqa: SIM118 - not a dict
            tensors = {name: file.get_tensor(name).to(dtype) for name in names}
    except FileNotFoundError:
        raise error(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as cause:
        raise error(f"{path} is torn or no safetensors file: {cause}") from cause
    check_tensors(path, tensors, shapes, error)
    return tensors


def check_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], error: ReadError
) -> None:
    """Refuse a missing tensor, or one of another shape, naming file and tensor."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise error(f"{path} has no tensor {name!r}; the policy needs it with shape {list(shape)}.")
        if tuple(tensors[name].shape) != shape:
            raise error(f"{path}: tensor {name!r} must have shape {list(shape)}; found {list(tensors[name].shape)}.")


def _weight_files(policy_dir: Path, error: ReadError) -> list[Path]:
    index = policy_dir / INDEX_FILE
    if not index.exists():
        if not (policy_dir / WEIGHTS_FILE).exists():
            raise error(f"{policy_dir} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; weights must be safetensors.")
        return [policy_dir / WEIGHTS_FILE]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise error(f"{index} is not an index of safetensors shards: {cause!r}.") from cause
    if not names or any(Path(name).name != name for name in names):
        raise error(f"{index} must name files of its own folder; found {names[:3]}.")
    return [policy_dir / name for name in names]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file; views are copied, because a file shares no memory."""
    owned = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(owned, path, metadata={"format": "pt"})


def write_policy_folder(
    policy_dir: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, source_dir: Path | None
) -> None:
    """Write a Hugging Face folder: config.json, weights, and the tokenizer's files of the source folder."""
    policy_dir.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    written = {**{name: value for name, value in config.items() if name != "torch_dtype"}, "dtype": dtype}
    (policy_dir / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_tensors(policy_dir / WEIGHTS_FILE, tensors)
    for name in COMPANION_FILES:
        if source_dir is not None and (source_dir / name).is_file():
            shutil.copyfile(source_dir / name, policy_dir / name)
