"""Folders of tensors: every layout can read those of any other, and damage is found."""

import itertools
import json
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensor_folders import (
    FILES,
    SHAPES,
    A,
    damage,
    empty,
    is_refused_or_right,
    piece,
    read_all,
    write,
    write_example,
)

from rl_core.errors import CheckpointError, DiskError
from rl_distill.checkpoints.pieces import INDEX_FILE, Piece, TensorFolder, write_pieces


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def test_it_comes_back_as_it_was(made: Path) -> None:
    assert TensorFolder(made).shapes() == SHAPES
    assert not is_refused_or_right(made)


def cuts(random_of: random.Random, size: int) -> list[tuple[int, int]]:
    stops = sorted({size, *(random_of.randint(1, size) for _ in range(random_of.randint(0, 3)))})
    return [(start, stop - start) for start, stop in zip([0, *stops], stops, strict=False)]


@pytest.mark.parametrize("case", range(20))
def test_any_layout_reads_any_other(case: int, tmp_path: Path) -> None:
    random_of = random.Random(case)
    whole = torch.randn([random_of.randint(1, 9) for _ in range(random_of.randint(0, 4))])

    def grid() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for rectangle in itertools.product(*(cuts(random_of, size) for size in whole.shape)):
            yield tuple(start for start, _ in rectangle), tuple(size for _, size in rectangle)

    ranks: list[list[Piece]] = [[] for _ in range(random_of.randint(1, 4))]
    for place in grid():
        random_of.choice(ranks).append(piece("w", whole, *place))
    folder = TensorFolder(write(tmp_path, ranks))

    wanted = [empty("w", tuple(whole.shape), *place) for place in grid()]
    folder.read(wanted)

    assert sum(part.tensor.numel() for part in wanted) == whole.numel()
    for part in wanted:
        assert torch.equal(part.tensor, piece("w", whole, part.offsets, tuple(part.tensor.shape)).tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32])
def test_other_numbers_come_back_too(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(6).view(2, 3).to(dtype)
    target = Piece(name="w", shape=(2, 3), offsets=(0, 0), tensor=torch.zeros(2, 3, dtype=dtype))
    TensorFolder(write(tmp_path, [[piece("w", whole)]])).read([target])
    assert torch.equal(target.tensor, whole)


def test_equal_tensors_make_equal_files(made: Path, tmp_path: Path) -> None:
    again = write_example(tmp_path)
    assert sorted(path.name for path in again.iterdir()) == sorted(FILES)
    assert all(path.read_bytes() == (made / path.name).read_bytes() for path in again.iterdir())


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DiskError, match=r"rank-00000.* cannot be written: .*too large.* free some"):
            write_pieces(tmp_path, [piece("w", torch.zeros(1 << 20))], rank=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    with pytest.raises(CheckpointError, match=r"pieces\.json does not exist"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "torn", "folder", "pipe"])
def test_a_missing_or_torn_file_is_named(name: str, how: str, folder: Path) -> None:
    damage(folder / name, how)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as raised:
        read_all(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "c"}, r"tensor 'a' has pieces that miss a part of it"),
        ({"shape": [6, 4]}, r"tensor 'a' must have shape \[4, 6\].*; found \[6, 4\]"),
        ({"shape": [4]}, r"must have shape \[4, 6\].*; found \[4\]"),
        ({"dtype": "bfloat16"}, "must have .* dtype torch.float32; found .* torch.bfloat16"),
        ({"offsets": [1, 0]}, "has pieces that miss a part of it, or overlap"),
        ({"sizes": [4, 6]}, "has pieces that miss a part of it, or overlap"),
        ({"offsets": [3, 0]}, "exceeds the tensor"),
        ({"offsets": [-2, 0]}, "exceeds the tensor"),
        ({"sizes": [0, 6]}, "is empty"),
        ({"offsets": [0], "sizes": [4]}, "exceeds the tensor"),
        ({"sizes": [1 << 62, 6]}, "exceeds the tensor"),
        ({"file": "rank-00007.safetensors"}, r"rank-00007\.safetensors does not exist"),
        ({"file": "rank-00001.safetensors"}, "rank-00001.safetensors is torn or damaged: .*a\\[0:2, 0:6\\]"),
        ({"crc32c": 1}, r"rank-00000\.safetensors is damaged: a\[0:2, 0:6\] differs from its entry in pieces\.json"),
        ({"crc32c": None}, r"pieces\.json is damaged"),
        ({"offsets": [0.5, 0]}, r"pieces\.json is damaged"),
        ({"other": 1}, r"pieces\.json is damaged"),
    ],
)
def test_a_wrong_entry_of_the_index_is_refused(changes: dict[str, object], says: str, folder: Path) -> None:
    entries = json.loads((folder / INDEX_FILE).read_bytes())
    assert entries[0]["name"] == "a"
    entries[0].update(changes)
    (folder / INDEX_FILE).write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=says) as raised:
        read_all(folder)
    assert str(folder) in str(raised.value)


def test_another_models_folder_is_refused(made: Path) -> None:
    folder = TensorFolder(made)
    with pytest.raises(CheckpointError, match="has a tensor 's', which this model does not have"):
        folder.check({"a": (4, 6), "b": (5,)})
    with pytest.raises(CheckpointError, match="has no tensor 'c'"):
        folder.read([empty("c", (2,))])


def test_pieces_of_two_checkpoints_do_not_mix(made: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "other", [[piece("a", A + 1, (row, 0), (2, 6))] for row in (0, 2)])
    shutil.copy(made / FILES[2], folder)
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged: a\[2:4, 0:6\]"):
        TensorFolder(folder).read([empty("a", (4, 6))])


def test_a_flipped_bit_in_a_number_is_always_refused(folder: Path) -> None:
    path = folder / FILES[1]
    content = path.read_bytes()
    start = content.index(A[:2].numpy().tobytes())
    bits = range(8 * A[:2].nbytes)
    assert len(bits) >= 64
    for bit in bits:
        flipped = bytearray(content)
        flipped[start + bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="is damaged: a"):
            read_all(folder)


def test_damage_anywhere_is_refused_or_harmless(made: Path, folder: Path) -> None:
    num_refused = 0
    for case in range(1000):
        random_of = random.Random(case)
        path = folder / random_of.choice(FILES)
        content = bytearray((made / path.name).read_bytes())
        at, some = random_of.randrange(len(content)), random_of.randint(1, 9)
        match random_of.choice(("flip", "cut", "set", "remove", "insert", "repeat")):
            case "flip":
                content[at] ^= 1 << random_of.randrange(8)
            case "cut":
                del content[at:]
            case "set":
                content[at] = random_of.randrange(256)
            case "remove":
                del content[at : at + some]
            case "insert":
                content[at:at] = random_of.randbytes(some)
            case _:
                content[at:at] = content[at : at + 11 * some]
        path.write_bytes(content)
        num_refused += is_refused_or_right(folder)
        shutil.copy(made / path.name, path)
    assert 800 < num_refused < 1000  # such as a flip in white space is harmless
    assert not is_refused_or_right(folder)
