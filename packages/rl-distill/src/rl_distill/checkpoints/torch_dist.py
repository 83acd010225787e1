"""Named tensors in torch.distributed.checkpoint's format (`torch_dist`), written and read in rectangles.

Every rank writes its pieces into its own file, and reads the rectangles it needs, whichever layout wrote them. torch
writes these folders and can read them. It stores their table of contents and every tensor's description as pickles.
This module reads them without an unpickler, so that no checkpoint can run code. It allocates nothing until shapes,
sizes and positions are known to match the model.
"""

import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.torch_dist_chunk import read_chunk
from rl_distill.checkpoints.torch_dist_table import ChunkedTensor, Shape, StoredChunk, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a named tensor.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the whole tensor.
        offsets: Start of the rectangle along each axis.
        tensor: Elements of the rectangle; contiguous and on the CPU when written or sent.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


Written = tuple[SavePlan, list[WriteResult]]
"""What one rank wrote: its plan and the results. `write_contents` builds the table of contents from all of them."""


class _PieceWriter(SavePlanner):
    """A planner that returns each piece when it is written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._tensors = {_index(piece): piece.tensor for piece in pieces}

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> SavePlan:
        """Unused: plans are built from pieces."""
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Unused; see `write_contents`."""
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the piece of an item."""
        return self._tensors[write_item.index]


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, piece.offsets)


def write_pieces(directory: Path, pieces: Sequence[Piece], *, rank: int, num_ranks: int) -> Written:
    """Write one rank's pieces into its own file.

    Args:
        directory: Target folder; created if missing.
        pieces: Pieces of this rank, disjoint from those of other ranks.
        rank: This rank; names the file.
        num_ranks: Number of ranks that write.

    Raises:
        OSError: Writing failed.
        CheckpointError: Writing failed inside torch.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Copying ahead only helps for tensors on a GPU; these are on the CPU.
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    plan = SavePlan([_write_item(piece) for piece in pieces])
    plan = writer.prepare_global_plan([plan] * num_ranks)[rank]
    try:
        results: list[WriteResult] = writer.write_data(plan, _PieceWriter(pieces)).wait()
    except RuntimeError as error:
        # torch's zip writer reports a full disk as a position: what was written is shorter than expected.
        is_full, free = "unexpected pos" in str(error), shutil.disk_usage(directory).free
        cause = f"the disk is probably full ({free} bytes are free)" if is_full else str(error)
        raise CheckpointError(f"cannot write {directory}: {cause}.") from error
    return SavePlan(plan.items), results


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
    """Write the table of contents after every rank has written; a folder without it is not a checkpoint."""
    _, metadata = create_default_global_save_plan([plan for plan, _ in written], rewrite_index_hints=False)
    _ContentsWriter(directory).finish(metadata, [results for _, results in written])


class _ContentsWriter(FileSystemWriter):
    """A writer that stores no time and no path, so that equal states give equal files."""

    def storage_meta(self) -> StorageMeta | None:
        """Return None, to store no extra metadata."""
        return None


class TensorFolder:
    """Reader of a folder that `write_pieces` and `write_contents` wrote."""

    def __init__(self, directory: Path) -> None:
        """Read the table of contents.

        Raises:
            CheckpointError: The table is missing or torn, names a class or function that is not allowed, or names files
                outside the folder.
        """
        self.directory = directory
        self._tensors = read_table(directory)

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor by name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Check that the folder has exactly these tensors, complete and in float32; no elements are read.

        Raises:
            CheckpointError: A tensor differs; the message names folder and tensor.
        """
        for name, shape in shapes.items():
            self._tensor(name, tuple(shape), torch.float32)
        for name in self._tensors:
            if name not in shapes:
                raise CheckpointError(f"{self.directory} has a tensor {name[:200]!r}, which this model does not have.")

    def read(self, wanted: Sequence[Piece]) -> None:
        """Read rectangles into existing tensors.

        Args:
            wanted: Rectangles to read; each piece's tensor is filled in place.

        Raises:
            CheckpointError: A file is missing or torn, or a part of a tensor was never written.
        """
        for piece in wanted:
            stored = self._tensor(piece.name, tuple(piece.shape), piece.tensor.dtype)
            for chunk in stored.chunks:
                shared = _shared(piece, chunk)
                if shared is not None:
                    elements = read_chunk(self.directory, chunk, stored.dtype)
                    target = piece.tensor[_slices(shared, piece.offsets)]
                    target.copy_(elements[_slices(shared, chunk.offsets)])

    def _tensor(self, name: str, shape: Shape, dtype: torch.dtype) -> ChunkedTensor:
        """Return a tensor of the expected shape and dtype, after checking that each element is stored exactly once."""
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.directory} has no tensor {name!r}; this model needs it with shape {list(shape)}."
            )
        found = self._tensors[name]
        if (found.shape, found.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{self.directory}: tensor {name!r} must have shape {list(shape)} and dtype {dtype}; "
                f"found {list(found.shape)} and {found.dtype}."
            )
        if (problem := found.problem()) is not None:
            raise CheckpointError(f"{self.directory} is incomplete: tensor {name!r} {problem}.")
        return found


def _shared(piece: Piece, chunk: StoredChunk) -> list[tuple[int, int]] | None:
    """Overlap of a rectangle and a chunk, [start, stop) along each axis; None if they are disjoint."""
    axes = zip(piece.offsets, piece.tensor.shape, chunk.offsets, chunk.sizes, strict=True)
    shared = [(max(a, b), min(a + a_size, b + b_size)) for a, a_size, b, b_size in axes]
    return shared if all(start < stop for start, stop in shared) else None


def _slices(shared: Sequence[tuple[int, int]], offsets: Shape) -> tuple[slice, ...]:
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(shared, offsets, strict=True))
