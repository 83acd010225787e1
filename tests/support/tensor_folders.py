"""Write a small folder of tensors, and read it completely."""

import os
from pathlib import Path

import torch

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.pieces import INDEX_FILE, Piece, TensorFolder, write_index, write_pieces

A = torch.arange(24, dtype=torch.float32).view(4, 6) / 7
B = torch.arange(5, dtype=torch.float32) - 2.5
TENSORS = {"a": A, "b": B, "s": torch.tensor(3.25)}
SHAPES = {"a": (4, 6), "b": (5,), "s": ()}
FILES = (INDEX_FILE, "rank-00000.safetensors", "rank-00001.safetensors")


def piece(name: str, whole: torch.Tensor, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Piece:
    offsets, sizes = offsets or (0,) * whole.ndim, sizes or tuple(whole.shape)
    part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    return Piece(name=name, shape=tuple(whole.shape), offsets=offsets, tensor=part.contiguous())


def empty(name: str, shape: tuple[int, ...], offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Piece:
    target = torch.full(sizes or shape, float("nan"))
    return Piece(name=name, shape=shape, offsets=offsets or (0,) * len(shape), tensor=target)


def write(directory: Path, ranks: list[list[Piece]]) -> Path:
    write_index(directory, [write_pieces(directory, pieces, rank=rank) for rank, pieces in enumerate(ranks)])
    return directory


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    folder = TensorFolder(directory)
    folder.check(SHAPES)
    wanted = [empty(name, shape) for name, shape in SHAPES.items()]
    folder.read(wanted)
    return {part.name: part.tensor for part in wanted}


def damage(path: Path, how: str) -> None:
    """Leave a file "missing", "empty" or "torn", or put a "folder" or a "pipe" in its place."""
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how != "missing":
        path.write_bytes(content[: len(content) // 2] if how == "torn" else b"")


def is_refused_or_right(directory: Path) -> bool:
    """Return True if the folder is refused; fail on other values or another error."""
    try:
        found = read_all(directory)
    except CheckpointError:
        return True
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    return False


def write_example(directory: Path) -> Path:
    """Write TENSORS from two ranks, which have half of "a" each."""
    halves = [piece("a", A, (row, 0), (2, 6)) for row in (0, 2)]
    return write(directory, [[halves[0], piece("b", B), piece("s", TENSORS["s"])], [halves[1]]])
