"""Tensors by name in torch.distributed.checkpoint's format (`torch_dist`), written and read in rectangles.

Every rank writes the pieces that it holds into a file of its own, and reads the rectangles that it needs, whatever
layout wrote them. The format keeps its table of contents in a pickle: here it is read by an unpickler that makes
that table's own classes and nothing else, and tensors are read with `weights_only`, so that no checkpoint runs code.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from rl_core.errors import CheckpointError

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 1 << 30

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
_TORCH_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a named tensor.

    Attributes:
        name: Of the whole tensor.
        shape: Of the whole tensor.
        offsets: Where the rectangle begins.
        tensor: Its elements, contiguous, on the CPU.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank wrote; `write_contents` makes the table of contents from all of them."""

    plan: SavePlan
    results: list[WriteResult]


class _PieceWriter(SavePlanner):
    """Hands each piece out when it is to be written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._tensors = {_index(piece): piece.tensor for piece in pieces}

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> SavePlan:
        """Not used: plans are made from pieces."""
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Not used: see `write_contents`."""
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The piece of this item."""
        return self._tensors[write_item.index]


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, piece.offsets)


def write_pieces(directory: Path, pieces: Sequence[Piece], *, rank: int, num_ranks: int) -> Written:
    """Write one rank's pieces into a file of its own.

    Args:
        directory: Is made where it does not exist.
        pieces: Of this rank; no other rank has the same.
        rank: Names the file.
        num_ranks: That write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    plan = SavePlan([_write_item(piece) for piece in pieces])
    plan = writer.prepare_global_plan([plan] * num_ranks)[rank]
    results: list[WriteResult] = writer.write_data(plan, _PieceWriter(pieces)).wait()
    return Written(SavePlan(plan.items), results)


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=_index(piece),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size()),
            properties=TensorProperties(dtype=piece.tensor.dtype),
            size=torch.Size(piece.shape),
        ),
    )


def write_contents(directory: Path, written: Sequence[Written]) -> None:
    """Write the table of contents, when every rank has written; without it a folder is no checkpoint."""
    _, metadata = create_default_global_save_plan([part.plan for part in written], rewrite_index_hints=False)
    _ContentsWriter(directory).finish(metadata, [part.results for part in written])


class _ContentsWriter(FileSystemWriter):
    """Says nothing of when and where: what is the same state is the same file."""

    def storage_meta(self) -> StorageMeta | None:
        """None."""
        return None


class _TableUnpickler(pickle.Unpickler):
    """Makes the classes of a table of contents, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that is allowed, or a torch dtype."""
        if name in _ALLOWED.get(module, ()) or (module == "torch" and name in _TORCH_DTYPES):
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in ("Path", "PosixPath", "WindowsPath"):
            return _as_text  # where it was written; nobody reads it
        return self._refuse(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """There is none in a table of contents."""
        self._refuse(f"persistent id {pid!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"asks for {what}, which no checkpoint needs, and which could run code; it was not made")


def _as_text(*parts: str) -> str:
    return "/".join(str(part) for part in parts)


class TensorFolder:
    """A folder that `write_pieces` and `write_contents` made, to read from."""

    def __init__(self, directory: Path) -> None:
        """Read the table of contents.

        Raises:
            CheckpointError: It is missing, torn, asks for something that could run code, or names files elsewhere.
        """
        self.directory = directory
        self._metadata = _read_table(directory)
        self._reader = FileSystemReader(directory)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: tuple(entry.size) for name, entry in self._entries().items()}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a folder that lacks a tensor, or has it in another shape.

        Raises:
            CheckpointError: Names folder and tensor.
        """
        found = self.shapes()
        for name, shape in shapes.items():
            if name not in found:
                raise CheckpointError(f"{self.directory} has no tensor {name!r}; this model needs it as {list(shape)}.")
            if found[name] != tuple(shape):
                raise CheckpointError(
                    f"{self.directory}: tensor {name!r} must have shape {list(shape)}; found {list(found[name])}."
                )

    def read(self, wanted: Sequence[Piece]) -> None:
        """Fill rectangles.

        Args:
            wanted: Each tensor is filled in place.

        Raises:
            CheckpointError: A file is missing or torn, or a part of a rectangle was never written.
        """
        self.check({piece.name: piece.shape for piece in wanted})
        items, targets = [], {}
        for number, piece in enumerate(wanted):
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size())
            found = create_read_items_for_chunk_list(f"{number}", self._entries()[piece.name], [chunk])
            covered = sum(int(torch.Size(item.lengths).numel()) for item in found)
            if covered != piece.tensor.numel():
                raise CheckpointError(f"{self.directory} lacks a part of {piece.name!r}; the checkpoint is not whole.")
            items += [_of_stored(item, piece.name) for item in found]
            targets[f"{number}"] = piece.tensor
        try:
            self._reader.read_data(LoadPlan(items), _PieceReader(targets)).wait()
        except (OSError, RuntimeError, ValueError, AssertionError, KeyError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.directory} is torn: {error}") from error

    def _entries(self) -> dict[str, TensorStorageMetadata]:
        return {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }


def _of_stored(item: ReadItem, name: str) -> ReadItem:
    """The item, with the name under which its chunk was stored; the target keeps the number."""
    stored = MetadataIndex(name, item.storage_index.offset)
    return ReadItem(
        type=item.type,
        dest_index=item.dest_index,
        dest_offsets=item.dest_offsets,
        storage_index=stored,
        storage_offsets=item.storage_offsets,
        lengths=item.lengths,
    )


class _PieceReader(LoadPlanner):
    """Hands out the rectangle that a part of a chunk belongs to."""

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self._targets = targets

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> LoadPlan:
        """Not used: plans are made from pieces."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As it is."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002 - torch's signature
        """There are none."""
        raise CheckpointError("a learner's checkpoint holds tensors alone; found bytes.")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a part goes."""
        target = self._targets[read_item.dest_index.fqn]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was copied already."""


def _read_table(directory: Path) -> Metadata:
    path = directory / METADATA_FILE
    try:
        size = path.stat().st_size
        if size > MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; a table of contents has less than {MAX_METADATA_BYTES}.")
        with path.open("rb") as file:
            metadata = _TableUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; {directory} is no complete checkpoint.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}." if str(path) not in str(error) else str(error)) from None
    except Exception as error:  # an unpickler of torn bytes raises anything
        raise CheckpointError(f"{path} is torn: {error!r}.") from error
    _check_table(path, metadata)
    metadata.storage_meta = None
    return metadata  # type: ignore[no-any-return]


def _check_table(path: Path, metadata: Any) -> None:
    """Refuse a table that is none, or whose files lie elsewhere."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} holds no table of contents; found {type(metadata).__name__}.")
    for index, stored in metadata.storage_data.items():
        name = getattr(stored, "relative_path", None)
        is_plain = isinstance(name, str) and Path(name).name == name and not (path.parent / name).is_symlink()
        if not isinstance(index, MetadataIndex) or not is_plain:
            raise CheckpointError(f"{path} must name files of its own folder; found {name!r}.")
