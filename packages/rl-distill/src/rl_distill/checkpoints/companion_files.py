"""Files of a model folder besides its weights, which belong to a policy and are carried byte for byte into exports.

They are copied, never opened as anything else, and nothing in them runs.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import DataError
from rl_core.files import preview, read_plain

_log = structlog.get_logger(__name__)

WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".ggml", ".h5", ".msgpack"),
    *(".onnx", ".onnx_data", ".tflite", ".safetensors.index.json", ".bin.index.json"),
)
"""Endings of files with weights of the source folder, or with their index; some can run code when they are opened."""

ADAPTER_FILES = ("adapter_config.json",)
"""Files that make libraries load an adapter beside the weights."""

LINKED_FILES = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json"),
)
"""Files that may be links to files of the same name outside their folder, as in folders that share a tokenizer."""

MAX_FILE_BYTES = 1 << 28
MAX_FOLDER_BYTES = 1 << 30
MAX_FILES = 10_000
FLOATS = ("bfloat16", "float16", "float32", "float64")
DTYPE_FIELDS = ("dtype", "torch_dtype")


def copy_companions(source: Path, target: Path) -> None:
    """Copy all files of a model folder that are not weights, with those in its subfolders, byte for byte.

    Left out are config.json, which `config_bytes` returns, hidden files, and the subfolder that contains the target.
    Also left out, with a warning, are links that lead out of the folder (except into the Hugging Face cache, and
    LINKED_FILES), pipes, names that are not UTF-8, and what exceeds MAX_FILE_BYTES, MAX_FOLDER_BYTES or MAX_FILES.

    Args:
        source: The model folder.
        target: An existing folder.

    Raises:
        OSError: A file cannot be copied.
    """
    left_out, num_files, num_bytes = [], 0, 0
    for path in _files(source, target):
        real, name = Path(os.path.realpath(path)), path.relative_to(source)
        size = real.stat().st_size if _may_copy(path, real, source) else MAX_FILE_BYTES + 1
        if size > MAX_FILE_BYTES or num_bytes + size > MAX_FOLDER_BYTES or num_files == MAX_FILES:
            left_out.append(preview(str(name), most=200))
            continue
        num_files, num_bytes = num_files + 1, num_bytes + size
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real, target / name)
    if left_out:
        _warn(str(source), len(left_out), left_out[0])


def _files(source: Path, target: Path) -> Iterator[Path]:
    """Yield the candidates, the files of each folder before those of its subfolders."""
    num_seen = 0
    for folder, subfolders, names in os.walk(source):
        here = Path(folder)
        subfolders[:] = sorted(
            name
            for name in subfolders
            if not name.startswith(".") and not target.resolve().is_relative_to((here / name).resolve())
        )
        for name in sorted(names):
            is_other = here == source and name in ("config.json", *ADAPTER_FILES)
            if not (name.startswith(".") or name.lower().endswith(WEIGHT_SUFFIXES) or is_other):
                yield here / name
        num_seen += len(names)
        if num_seen > MAX_FILES:
            return


def _may_copy(path: Path, real: Path, source: Path) -> bool:
    """Return whether a path is a regular file of the folder, or an accepted link."""
    home = source.resolve()
    in_cache = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    is_linked = path.parent == source and path.name in LINKED_FILES and real.name == path.name
    is_utf8 = not re.search("[\ud800-\udfff]", str(path))
    return is_utf8 and real.is_file() and (real.is_relative_to(home) or in_cache or is_linked)


@lru_cache
def _warn(source: str, num_files: int, first: str) -> None:
    """Warn once a process, although each checkpoint leaves out the same files."""
    _log.warning("files_left_out", policy_dir=source, num_files=num_files, first=first)


def config_bytes(config: Mapping[str, Any], *, dtype: str, source: Path | None) -> bytes:
    """Return the content of config.json: that of the source, in which at most the dtype of the weights changes.

    Args:
        config: The parsed content.
        dtype: Dtype of the weights, such as "bfloat16".
        source: The folder from which it was read; None if there is none.
    """
    try:
        raw = b"" if source is None else read_plain(source / "config.json", max_bytes=MAX_FILE_BYTES)
        is_same = bool(raw) and _text(json.loads(raw)) == _text(config)
    except (DataError, ValueError, RecursionError):  # removed or changed since
        is_same = False
    if not is_same:  # of random weights, or a critic's
        kept = {name: value for name, value in config.items() if name != "torch_dtype"}
        return (json.dumps({**kept, "dtype": dtype}, indent=2, sort_keys=True) + "\n").encode()
    wanted = _with_dtype(config, dtype)
    if _text(wanted) == _text(config):
        return raw
    pattern = rf'("(?:{"|".join(DTYPE_FIELDS)})"\s*:\s*)"(?:torch\.)?(?:{"|".join(FLOATS)})"'
    changed = re.sub(pattern.encode(), rb'\1"%b"' % dtype.encode(), raw)
    is_wanted = _text(json.loads(changed)) == _text(wanted)
    return changed if is_wanted else (json.dumps(wanted, indent=2) + "\n").encode()


def _text(content: Any) -> str:
    return json.dumps(content, sort_keys=True)


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the configuration with another dtype in those fields that name one."""
    named = {name: dtype for name in DTYPE_FIELDS if str(config.get(name)).removeprefix("torch.") in FLOATS}
    inner = config.get("text_config")
    named_inside = {"text_config": _with_dtype(inner, dtype)} if isinstance(inner, Mapping) else {}
    return {**config, **named, **named_inside}
