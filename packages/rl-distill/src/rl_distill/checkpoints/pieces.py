"""Named tensors in rectangles: one safetensors file per rank, and one JSON index with a checksum of each rectangle.

Every rank writes its pieces into its own file, and reads the rectangles it needs, whichever layout wrote them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_core.errors import CheckpointError
from rl_core.files import current_umask, read_record, require_plain, sync_file, write_durably
from rl_core.weights import tensor_crc32c, write_safetensors
from rl_distill.architecture.tensor_shapes import Shape

INDEX_FILE = "pieces.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a named tensor, with any number of axes.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the whole tensor.
        offsets: Start of the rectangle along each axis.
        tensor: Elements of the rectangle; contiguous and on the CPU when written or sent.
    """

    name: str
    shape: Shape
    offsets: Shape
    tensor: Tensor


class StoredPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the index: a rectangle and its location.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the whole tensor.
        dtype: Dtype of the elements, such as "float32".
        offsets: Start of the rectangle along each axis.
        sizes: Size of the rectangle along each axis.
        file: Name of the safetensors file in the folder.
        crc32c: Checksum of the elements.
    """

    name: str
    shape: Shape
    dtype: str
    offsets: Shape
    sizes: Shape
    file: str
    crc32c: int

    @property
    def key(self) -> str:
        """Name in the file, such as "weights/lm_head.weight[0:64, 0:32]"."""
        axes = zip(self.offsets, self.sizes, strict=True)
        return f"{self.name}[{', '.join(f'{start}:{start + size}' for start, size in axes)}]"


def write_pieces(directory: Path, pieces: Sequence[Piece], *, rank: int) -> list[StoredPiece]:
    """Write one rank's pieces into its own file, and return their entries of the index.

    Args:
        directory: Target folder; created if missing.
        pieces: Pieces of this rank, disjoint from those of other ranks.
        rank: This rank; names the file.

    Raises:
        OSError: Writing failed.
        DiskError: Writing failed; the message says how many bytes are free.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"rank-{rank:05d}.safetensors"
    stored = [
        StoredPiece(
            piece.name,
            piece.shape,
            str(piece.tensor.dtype).removeprefix("torch."),
            piece.offsets,
            tuple(piece.tensor.shape),
            file.name,
            tensor_crc32c(piece.tensor),
        )
        for piece in pieces
    ]
    write_safetensors({entry.key: piece.tensor for entry, piece in zip(stored, pieces, strict=True)}, file)
    file.chmod(0o666 & ~current_umask())  # safetensors creates it with mode 0600
    sync_file(file)
    return stored


def write_index(directory: Path, of_ranks: Iterable[Sequence[StoredPiece]]) -> None:
    """Write the index after every rank has written; a folder without it is not a checkpoint."""
    lines = [msgspec.json.encode(entry) for of_rank in of_ranks for entry in of_rank]
    write_durably(directory / INDEX_FILE, b"[\n" + b",\n".join(lines) + b"\n]\n")


class TensorFolder:
    """Reader of a folder that `write_pieces` and `write_index` wrote."""

    def __init__(self, directory: Path) -> None:
        """Read the index.

        Raises:
            CheckpointError: The index is missing, torn, or not one that `write_index` wrote.
        """
        self.directory = directory
        self._stored: dict[str, list[StoredPiece]] = {}
        for entry in read_record(directory / INDEX_FILE, list[StoredPiece], error=CheckpointError):
            self._stored.setdefault(entry.name, []).append(entry)

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor by name."""
        return {name: stored[0].shape for name, stored in self._stored.items()}

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Check that the folder has exactly these tensors, complete and in float32; no elements are read.

        Raises:
            CheckpointError: A tensor differs; the message names folder and tensor.
        """
        for name, shape in shapes.items():
            self._complete(name, tuple(shape), torch.float32)
        for name in self._stored:
            if name not in shapes:
                raise CheckpointError(f"{self.directory} has a tensor {name[:200]!r}, which this model does not have.")

    def read(self, wanted: Sequence[Piece]) -> None:
        """Read rectangles into existing tensors.

        Args:
            wanted: Rectangles to read; each piece's tensor is filled in place.

        Raises:
            CheckpointError: A file is missing or damaged, or a part of a tensor was never written.
        """
        targets: dict[str, list[Piece]] = {}
        for piece in wanted:
            targets.setdefault(piece.name, []).append(piece)
        stored_in: dict[str, list[StoredPiece]] = {}
        for name, of_name in targets.items():
            for stored in self._complete(name, of_name[0].shape, of_name[0].tensor.dtype):
                stored_in.setdefault(stored.file, []).append(stored)
        for file, entries in stored_in.items():
            path = self.directory / file
            require_plain(path, error=CheckpointError)
            try:
                with safe_open(path, framework="pt") as opened:
                    for stored in entries:
                        _copy(opened, stored, targets[stored.name], path=path)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is torn or damaged: {error}.") from None

    def _complete(self, name: str, shape: Shape, dtype: torch.dtype) -> list[StoredPiece]:
        """Return the pieces of a tensor, after checking its shape and dtype, and that each element is stored once."""
        if name not in self._stored:
            raise CheckpointError(
                f"{self.directory} has no tensor {name!r}; this model needs it with shape {list(shape)}."
            )
        stored = self._stored[name]
        for piece in stored:
            if (piece.shape, f"torch.{piece.dtype}") != (shape, str(dtype)):
                raise CheckpointError(
                    f"{self.directory}: tensor {name!r} must have shape {list(shape)} and dtype {dtype}; "
                    f"found {list(piece.shape)} and torch.{piece.dtype}."
                )
        if (problem := _problem(stored)) is not None:
            raise CheckpointError(f"{self.directory} is incomplete: tensor {name!r} {problem}.")
        return stored


def _problem(pieces: Sequence[StoredPiece]) -> str | None:
    """Describe why pieces of a tensor do not cover each element exactly once; None if they do."""
    shape = pieces[0].shape
    for piece in pieces:
        ends = [start + size for start, size in zip(piece.offsets, piece.sizes, strict=False)]
        if not len(piece.offsets) == len(piece.sizes) == len(shape) or any(
            start < 0 or size < 1 or end > whole
            for start, size, end, whole in zip(piece.offsets, piece.sizes, ends, shape, strict=True)
        ):
            return f"has a piece {list(piece.sizes)} at {list(piece.offsets)}, which is empty or exceeds the tensor"
    starts = np.array([piece.offsets for piece in pieces], dtype=np.int64)
    stops = starts + np.array([piece.sizes for piece in pieces], dtype=np.int64)
    overlaps = any(
        bool(((starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])).all(axis=1).any())
        for i in range(len(pieces) - 1)
    )
    num_stored = sum(math.prod(piece.sizes) for piece in pieces)
    return "has pieces that miss a part of it, or overlap" if overlaps or num_stored != math.prod(shape) else None


def _copy(opened: Any, stored: StoredPiece, targets: Sequence[Piece], *, path: Path) -> None:
    """Copy the overlaps of a stored piece with the targets, after checking its elements."""
    overlaps = [(target, overlap) for target in targets if (overlap := _overlap(target, stored)) is not None]
    if not overlaps:
        return
    elements = opened.get_tensor(stored.key)
    found = tuple(elements.shape), elements.dtype, tensor_crc32c(elements)
    if found != (stored.sizes, targets[0].tensor.dtype, stored.crc32c):
        raise CheckpointError(f"{path} is damaged: {stored.key} differs from its entry in {INDEX_FILE}.")
    for target, overlap in overlaps:
        target.tensor[_slices(overlap, target.offsets)] = elements[_slices(overlap, stored.offsets)]


def _overlap(target: Piece, stored: StoredPiece) -> list[tuple[int, int]] | None:
    """Overlap of two rectangles of a tensor, [start, stop) along each axis; None if they are disjoint."""
    axes = zip(target.offsets, target.tensor.shape, stored.offsets, stored.sizes, strict=True)
    shared = [(max(a, b), min(a + a_size, b + b_size)) for a, a_size, b, b_size in axes]
    return shared if all(start < stop for start, stop in shared) else None


def _slices(overlap: Sequence[tuple[int, int]], offsets: Shape) -> tuple[slice, ...]:
    """Slices of a rectangle that starts at these offsets."""
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(overlap, offsets, strict=True))
