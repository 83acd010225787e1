"""Hugging Face folders of safetensors: check, read parts of tensors, write."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_core.errors import DataError, SettingsError
from rl_core.files import current_umask, read_json_object, read_safetensors_header
from rl_core.weights import write_safetensors
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.architecture.tensor_shapes import Shape, keeps_float32, output_name, tensor_shapes
from rl_distill.architecture.transformers_model import is_left_out
from rl_distill.checkpoints.companion_files import config_bytes, copy_companions

_log = structlog.get_logger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
VALUE_HEAD = ("score.weight", "score.bias")
"""Tensors of a critic's head, which its folder has beside the model's."""

STORED_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes per element of each dtype in which weights may be stored."""

_ROWS = 4096
"""Rows of a tied tensor that are compared at once."""

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Stored:
    """Location of a tensor: file and name; for an expert of a fused tensor, its index and first row."""

    path: Path
    name: str
    shape: Shape
    dtype: str
    expert: int | None = None
    first_row: int = 0

    def slices(self, offsets: Shape, sizes: Shape) -> tuple[slice, ...]:
        """Slices of the stored tensor for a rectangle of this one."""
        starts = (self.first_row + offsets[0], *offsets[1:]) if offsets else ()
        parts = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        return parts if self.expert is None else (slice(self.expert, self.expert + 1), *parts)


class PolicyTensors:
    """The tensors of a Hugging Face folder, read rectangle by rectangle.

    Names are those of `tensor_shapes`, with one entry per expert. Folders that store a layer's experts fused
    (`mlp.experts.gate_up_proj`, `mlp.experts.down_proj`) are supported. Weights may be in one file or in shards, as
    float32, bfloat16 or float16.

    Attributes:
        num_bytes_read: Bytes read so far over all rectangles, in the stored dtype.
    """

    def __init__(self, policy_dir: Path, config: PolicyConfig, *, optional: frozenset[str] = frozenset()) -> None:
        """Open the files, and check from their headers that all tensors exist.

        Args:
            policy_dir: The Hugging Face folder.
            config: The parsed config.json.
            optional: Names of tensors that may be missing.

        Raises:
            DataError: A file or tensor is missing or torn, has another shape or dtype, or is not part of the model.
        """
        self.num_bytes_read = 0
        paths, listed = _weight_files(policy_dir)
        self._files = {path: _open(path) for path in paths}
        stored = _stored_tensors(self._files, listed)
        own_names = {} if config.model_json else _unfused(stored, num_experts=config.num_experts)
        self._stored = {**stored, **own_names}
        self._config, self._shapes = config, tensor_shapes(config)
        shapes = self._shapes
        where = paths[0] if len(paths) == 1 else policy_dir
        _check(where, self._stored, {n: s for n, s in shapes.items() if n in self._stored or n not in optional})
        used = {(self._stored[name].path, self._stored[name].name) for name in shapes if name in self._stored}
        extra = sorted(n for n, t in stored.items() if (t.path, t.name) not in used and n not in config.tied)
        others = [name for name in extra if config.model_json and name not in VALUE_HEAD]
        unknown = [name for name in others if not is_left_out(config.model_json, name)]
        if unknown:
            raise DataError(
                f"{stored[unknown[0]].path}: tensor {unknown[0]!r} is not part of {config.architecture} "
                f"({len(unknown)} such tensors), so exports would lose it. Correct config.json, or remove them."
            )
        if extra:
            _log.warning("tensors_ignored", policy_dir=str(policy_dir), num_tensors=len(extra), first=extra[0])
        for name, shared in config.tied.items():
            if name in stored and shared in stored:
                self._check_tied(name, shared)

    def __contains__(self, name: str) -> bool:
        """Whether the folder has a tensor with this name."""
        return name in self._stored

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        return _TORCH_DTYPES[self._stored[name].dtype]

    def read(self, name: str, offsets: Shape, sizes: Shape, *, dtype: torch.dtype) -> Tensor:
        """Read a rectangle of a tensor, and nothing else of it.

        Args:
            name: Name of the tensor.
            offsets: Start of the rectangle along each axis.
            sizes: Size of the rectangle along each axis.
            dtype: Dtype of the result.

        Raises:
            DataError: There is no such tensor, or the rectangle exceeds it.
        """
        stored = self._stored.get(name)
        if stored is None:
            raise DataError(f"the folder has no tensor {name!r}; it has {len(self._stored)} others.")
        ends = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
        if len(ends) != len(stored.shape) or any(e > s for e, s in zip(ends, stored.shape, strict=True)):
            raise DataError(
                f"{stored.path}: tensor {name!r} must have a size of at least {list(ends)}; found shape "
                f"{list(stored.shape)}."
            )
        _check_dtype(name, stored)
        if 0 in sizes:
            return torch.empty(sizes, dtype=dtype)
        try:
            value = self._files[stored.path].get_slice(stored.name)[stored.slices(offsets, sizes)]
        except (SafetensorError, OSError) as cause:
            raise DataError(f"{stored.path}: tensor {name!r} cannot be read: {cause}") from cause
        self.num_bytes_read += math.prod(sizes) * STORED_DTYPES[stored.dtype]
        return value.reshape(sizes).to(dtype)  # type: ignore[no-any-return]

    def _check_tied(self, name: str, shared: str) -> None:
        """Raise a `DataError` if the folder stores other values for a tied tensor, which transformers would not tie."""
        first, other = self._stored[name], self._stored[shared]
        is_equal = (first.shape, first.dtype) == (other.shape, other.dtype)
        for row in range(0, first.shape[0] if is_equal and first.shape else 0, _ROWS):
            offsets = (row, *(0 for _ in first.shape[1:]))
            sizes = (min(_ROWS, first.shape[0] - row), *first.shape[1:])
            parts = [self.read(one, offsets, sizes, dtype=self.dtype(one)) for one in (name, shared)]
            is_equal = is_equal and torch.equal(*parts)
        if not is_equal:
            raise DataError(
                f"{first.path}: tensor {name!r} differs from {shared!r}, although config.json ties them. Set "
                "tie_word_embeddings to false in config.json, or remove the tensor."
            )

    def whole(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the policy in this dtype; None keeps the stored one. A router's bias is float32."""
        for name, shape in self._shapes.items():
            wanted = torch.float32 if keeps_float32(name, self._config) else (dtype or self.dtype(name))
            yield name, self.read(name, (0,) * len(shape), shape, dtype=wanted)


def _open(path: Path) -> Any:
    read_safetensors_header(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as cause:
        raise DataError(f"{path} is torn or not a safetensors file: {cause}") from cause


def _stored_tensors(files: Mapping[Path, Any], listed: Mapping[str, str]) -> dict[str, _Stored]:
    """Tensors in the headers of the files; one stored in several files is taken from the file that the index lists."""
    stored: dict[str, _Stored] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 - not a dict
            if listed.get(name, path.name) == path.name:
                part = file.get_slice(name)
                stored[name] = _Stored(path, name, tuple(part.get_shape()), part.get_dtype())
    missing = sorted(listed.keys() - stored.keys())
    if missing:
        raise DataError(f"{listed[missing[0]]} has no tensor {missing[0]!r}, although {INDEX_FILE} lists it there.")
    return stored


def _unfused(stored: Mapping[str, _Stored], *, num_experts: int) -> dict[str, _Stored]:
    """Split the experts of layers that fuse them: [experts, 2 * ffn, hidden] and [experts, hidden, ffn]."""
    parts: dict[str, _Stored] = {}
    for name, tensor in stored.items():
        prefix, _, kind = name.rpartition(".mlp.experts.")
        if kind not in ("gate_up_proj", "down_proj") or len(tensor.shape) != 3:
            continue
        found, rows, columns = tensor.shape
        if found != num_experts:
            raise DataError(f"{tensor.path}: tensor {name!r} must have {num_experts} experts; found {found}.")
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        size = rows // len(names)
        for expert in range(num_experts):
            for i, part in enumerate(names):
                own = _Stored(tensor.path, name, (size, columns), tensor.dtype, expert, i * size)
                parts[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = own
    return parts


def _check(where: Path, stored: Mapping[str, _Stored], shapes: Mapping[str, Shape]) -> None:
    """Raise a `DataError` with file and tensor if a tensor is missing, or has another shape or dtype."""
    for name, shape in shapes.items():
        if name not in stored:
            raise DataError(f"{where} has no tensor {name!r}; the policy needs it with shape {list(shape)}.")
        found = stored[name]
        if found.shape != shape:
            raise DataError(f"{found.path}: tensor {name!r} must have shape {list(shape)}; found {list(found.shape)}.")
        _check_dtype(name, found)


def _check_dtype(name: str, found: _Stored) -> None:
    if found.dtype not in STORED_DTYPES:
        raise DataError(
            f"{found.path}: tensor {name!r} must be stored as one of {', '.join(STORED_DTYPES)}; "
            f"found {found.dtype}. Convert the folder first."
        )


def _weight_files(policy_dir: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files with weights, and the file of each tensor in the index, if there is one."""
    index = policy_dir / INDEX_FILE
    if not os.path.lexists(index):
        if not os.path.lexists(policy_dir / WEIGHTS_FILE):
            raise DataError(f"{policy_dir} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; weights must be safetensors.")
        return [policy_dir / WEIGHTS_FILE], {}
    try:
        weight_map = read_json_object(index)["weight_map"]
        listed = {str(name): str(file) for name, file in weight_map.items()}
    except (DataError, KeyError, TypeError, AttributeError) as cause:
        raise DataError(f"{index} is not an index of safetensors shards: {cause!r}.") from cause
    names = sorted(set(listed.values()))
    if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
        raise DataError(f"{index} must name safetensors files of its own folder; found {names[:3]}.")
    return [policy_dir / name for name in names], listed


def write_policy_folder(
    policy_dir: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    source_dir: Path | None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a Hugging Face folder: weights, config.json, and all other files of the source folder, byte for byte.

    Args:
        policy_dir: Target folder; created if missing. It must not contain weights.
        config: Content of config.json, whose text is kept if the source folder has it; only a `dtype` changes to that
            of the tensors.
        tensors: Tensors by Hugging Face name. Each is consumed before the next is requested.
        source_dir: Folder with the other files (`copy_companions`); None to write none.
        max_shard_bytes: Maximum bytes per file, and in memory; a larger tensor gets its own file.

    Raises:
        DataError: The folder has weights, there are no tensors, or a name occurs twice.
        DiskError: A file cannot be written.
    """
    policy_dir.mkdir(parents=True, exist_ok=True)
    if any(policy_dir.glob("*.safetensors*")):
        raise DataError(f"{policy_dir} already has weights; choose a new folder, or remove them.")
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    shards: list[tuple[Path, dict[str, int]]] = []
    dtype = ""
    for shard in _shards(pairs, max_shard_bytes):
        path = policy_dir / f"weights-{len(shards)}.partial"
        write_safetensors(shard, path, metadata={"format": "pt"})
        path.chmod(0o666 & ~current_umask())  # safetensors creates it with mode 0600
        shards.append((path, {name: tensor.nbytes for name, tensor in shard.items()}))
        dtype = dtype or str(next(iter(shard.values())).dtype).removeprefix("torch.")
    _name_shards(policy_dir, shards)
    (policy_dir / "config.json").write_bytes(config_bytes(config, dtype=dtype, source=source_dir))
    if source_dir is not None:
        copy_companions(source_dir, policy_dir)


def _shards(pairs: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    names: set[str] = set()
    num_bytes = 0
    for name, tensor in pairs:
        if name in names:
            raise DataError(f"tensor {name!r} occurs twice; tensor names must be unique.")
        if shard and num_bytes + tensor.nbytes > max_bytes:
            yield shard
            shard, num_bytes = {}, 0
        names.add(name)
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        num_bytes += tensor.nbytes
    if not shard:
        raise DataError("there are no tensors to write; a policy has at least one.")
    yield shard


def _name_shards(policy_dir: Path, shards: list[tuple[Path, dict[str, int]]]) -> None:
    """Rename the files to include the number of shards, and write the index if there is more than one."""
    if len(shards) == 1:
        shards[0][0].rename(policy_dir / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, sizes) in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(policy_dir / file)
        weight_map.update(dict.fromkeys(sizes, file))
    total = sum(size for _, sizes in shards for size in sizes.values())
    write_json(policy_dir / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_heads(
    folders: Sequence[Path],
    student: PolicyConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[Tensor]:
    """Read a rank's vocabulary slice [V of the slice, H] of each teacher's output matrix.

    A teacher's padding rows beyond the student's vocabulary are dropped.

    Args:
        folders: Hugging Face folders of the teachers.
        student: The student's configuration.
        dtype: Dtype of the matrices.
        device: Device of the matrices.
        rank: Index of the vocabulary slice.
        num_ranks: Number of slices of equal length; the last is padded with zeros.

    Raises:
        SettingsError: A teacher has a smaller vocabulary than the student.
        DataError: A file or tensor is missing or incomplete.
    """
    width = -(-student.vocab_size // num_ranks)
    first = rank * width
    num_rows = max(0, min(width, student.vocab_size - first))
    heads = []
    for folder in folders:
        config = parse_policy_config(read_policy_config(folder))
        if config.vocab_size < student.vocab_size:
            raise SettingsError(
                f"teacher {folder} has {config.vocab_size} tokens, the student {student.vocab_size}; their full "
                'distributions cannot be compared. Use distribution = "top_k".'
            )
        name = output_name(config)
        name = config.tied.get(name, name)
        head = torch.zeros(width, config.hidden_size, dtype=dtype)
        rows = PolicyTensors(folder, config).read(name, (first, 0), (num_rows, config.hidden_size), dtype=dtype)
        head[:num_rows] = rows
        heads.append(head.to(device))
    return heads
