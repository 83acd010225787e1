"""torch_dist folders: every layout can read those of any other, so can torch, and torn ones are refused."""

import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensor_folders import (
    FILES,
    SHAPES,
    TENSORS,
    A,
    empty,
    is_refused_or_right,
    piece,
    read_all,
    write,
    write_example,
)

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.torch_dist import Piece, TensorFolder, write_pieces


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def test_it_comes_back_as_it_was(made: Path) -> None:
    assert TensorFolder(made).shapes() == SHAPES
    assert not is_refused_or_right(made)


def test_a_folder_of_an_old_patch_release_of_python_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2, Debian 12's own, pickles an enum's member as an attribute of its class."""
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    folder = write_example(tmp_path)
    monkeypatch.undo()
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert TensorFolder(folder).shapes() == SHAPES
    assert not is_refused_or_right(folder)


def cuts(random_of: random.Random, size: int) -> list[tuple[int, int]]:
    stops = sorted({size, *(random_of.randint(1, size) for _ in range(random_of.randint(0, 3)))})
    return [(start, stop - start) for start, stop in zip([0, *stops], stops, strict=False)]


@pytest.mark.parametrize("case", range(20))
def test_any_layout_reads_any_other(case: int, tmp_path: Path) -> None:
    random_of = random.Random(case)
    whole = torch.randn(random_of.randint(1, 9), random_of.randint(1, 9), random_of.randint(1, 3))

    def grid() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        rows, columns = cuts(random_of, whole.shape[0]), cuts(random_of, whole.shape[1])
        return (((r, c, 0), (rs, cs, whole.shape[2])) for r, rs in rows for c, cs in columns)

    ranks: list[list[Piece]] = [[] for _ in range(random_of.randint(1, 4))]
    for place in grid():
        random_of.choice(ranks).append(piece("w", whole, *place))
    folder = TensorFolder(write(tmp_path, ranks))

    wanted = [empty("w", tuple(whole.shape), *place) for place in grid()]
    folder.read(wanted)

    for part in wanted:
        assert torch.equal(part.tensor, piece("w", whole, part.offsets, tuple(part.tensor.shape)).tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32])
def test_other_numbers_come_back_too(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(6).view(2, 3).to(dtype)
    target = Piece(name="w", shape=(2, 3), offsets=(0, 0), tensor=torch.zeros(2, 3, dtype=dtype))
    TensorFolder(write(tmp_path, [[piece("w", whole)]])).read([target])
    assert torch.equal(target.tensor, whole)


def test_torch_reads_it(made: Path) -> None:
    found = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    dcp.load(found, checkpoint_id=made, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_what_torch_wrote_is_read(tmp_path: Path) -> None:
    dcp.save(TENSORS, checkpoint_id=tmp_path, no_dist=True)
    assert not is_refused_or_right(tmp_path)


def test_equal_tensors_make_equal_files(made: Path, tmp_path: Path) -> None:
    again = write_example(tmp_path)
    assert sorted(path.name for path in again.iterdir()) == sorted(FILES)
    assert all(path.read_bytes() == (made / path.name).read_bytes() for path in again.iterdir())


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            (OSError, CheckpointError), match=r"too large|cannot write .*: the disk is probably full \("
        ):
            write_pieces(tmp_path, [piece("w", torch.zeros(1 << 20))], rank=0, num_ranks=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    with pytest.raises(CheckpointError, match="does not exist"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "link", "folder", "pipe"])
def test_files_that_are_none_are_refused(name: str, damage: str, folder: Path) -> None:
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "link":
        (folder / "moved").write_bytes(content)
        path.symlink_to(folder / "moved")
    elif damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as raised:
        read_all(folder)
    assert str(folder) in str(raised.value)


def test_a_table_of_absurd_length_is_not_read(folder: Path) -> None:
    os.truncate(folder / ".metadata", (1 << 28) + 1)
    with pytest.raises(CheckpointError, match=r"has 268435457 bytes; a table of contents must have at most 268435456"):
        TensorFolder(folder)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_flipped_bit_anywhere_is_refused_or_harmless(name: str, folder: Path) -> None:
    """Checksums of the zip files detect changed numbers; names and sizes must be consistent."""
    path = folder / name
    content = path.read_bytes()
    num_refused = 0
    positions = range(min(len(content), 1600))  # the first chunk and some of the next
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position * 5 % 8)
        path.write_bytes(flipped)
        num_refused += is_refused_or_right(folder)
    assert num_refused > 0.25 * len(positions)


def test_a_flipped_bit_in_a_number_is_always_refused(folder: Path) -> None:
    path = folder / FILES[1]
    content = path.read_bytes()
    start = content.index(A[:2].numpy().tobytes())
    for bit in range(8 * A[:2].nbytes):
        flipped = bytearray(content)
        flipped[start + bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="Bad CRC-32"):
            read_all(folder)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_file_cut_anywhere_is_refused(name: str, folder: Path) -> None:
    path = folder / name
    content = path.read_bytes()
    for length in range(0, len(content), 3):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_all(folder)


@pytest.mark.parametrize("case", range(200))
def test_scrambled_bytes_are_refused_or_harmless(case: int, folder: Path) -> None:
    random_of = random.Random(case)
    path = folder / random_of.choice(FILES)
    content = bytearray(path.read_bytes())
    for _ in range(random_of.randint(1, 4)):
        at = random_of.randrange(len(content))
        kind = random_of.choice(("set", "remove", "insert", "repeat"))
        if kind == "set":
            content[at] = random_of.randrange(256)
        elif kind == "remove":
            del content[at : at + random_of.randint(1, 9)]
        elif kind == "insert":
            content[at:at] = random_of.randbytes(random_of.randint(1, 9))
        else:
            content[at:at] = content[at : at + random_of.randint(1, 99)]
    path.write_bytes(content)
    is_refused_or_right(folder)
