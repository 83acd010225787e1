"""torch_dist folders with forged tables or chunks are refused; no code runs, and allocations are bounded."""

import os
import pickle
import shutil
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_folders import (
    FILES,
    B,
    empty,
    is_refused_or_right,
    piece,
    read_all,
    write,
    write_example,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.torch_dist import TensorFolder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def change(folder: Path, edit: Callable[[Metadata], None]) -> None:
    """Edit the table of contents, as anyone with write access could."""
    path = folder / ".metadata"
    table = pickle.loads(path.read_bytes())
    edit(table)
    path.write_bytes(pickle.dumps(table))


def chunk(table: Metadata, number: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Change the rectangle of a stored chunk of "a"."""
    chunks = table.state_dict_metadata["a"].chunks
    stored = table.storage_data.pop(MetadataIndex("a", chunks[number].offsets))
    chunks[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    table.storage_data[MetadataIndex("a", offsets)] = stored


def stored(table: Metadata, **changes: Any) -> None:
    """Change the location of the first chunk of "a"."""
    for name, value in changes.items():
        setattr(table.storage_data[MetadataIndex("a", (0, 0))], name, value)


def more_chunks(table: Metadata) -> None:
    table.state_dict_metadata["a"].chunks *= 3000


def not_dense(table: Metadata) -> None:
    table.state_dict_metadata["a"].properties.layout = torch.sparse_coo


def other(name: str, value: Any) -> Callable[[Metadata], None]:
    return lambda table: setattr(table.state_dict_metadata["a"], name, value)


TABLES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "tensor missing": (lambda table: table.state_dict_metadata.pop("a"), r"has no tensor 'a'; this model needs"),
    "tensor too many": (
        lambda table: table.state_dict_metadata.update(c=table.state_dict_metadata["a"]),
        "does not locate",
    ),
    "other shape": (other("size", torch.Size((6, 4))), r"must have shape \[4, 6\].*; found \[6, 4\]"),
    "absurd shape": (other("size", torch.Size((2**40, 2**20))), "must have shape"),
    "shape too large for a number": (other("size", (2**70, 1)), "not a table of contents"),
    "shape of a hundred axes": (other("size", torch.Size([1] * 100)), "at most 16"),
    "other dtype": (other("properties", TensorProperties(torch.bfloat16)), r"found \[4, 6\] and torch.bfloat16"),
    "not dense": (not_dense, "must be a dense tensor"),
    "bytes": (lambda table: table.state_dict_metadata.update(a=BytesStorageMetadata()), "has no tensor 'a'"),
    "no chunks": (other("chunks", []), "has 0 chunks"),
    "chunk missing": (lambda table: table.state_dict_metadata["a"].chunks.pop(), "miss a part"),
    "chunk twice": (lambda table: table.state_dict_metadata["a"].chunks.reverse() or more_chunks(table), "6000 chunks"),
    "chunks overlap": (lambda table: chunk(table, 1, (1, 0), (2, 6)), "or overlap"),
    "chunk on chunk": (
        lambda table: table.state_dict_metadata["a"].chunks.__setitem__(1, table.state_dict_metadata["a"].chunks[0]),
        "or overlap",
    ),
    "chunk beyond": (lambda table: chunk(table, 1, (3, 0), (2, 6)), "exceeds the tensor"),
    "chunk empty": (lambda table: chunk(table, 1, (2, 0), (0, 6)), "is empty"),
    "chunk negative": (lambda table: chunk(table, 1, (-2, 0), (2, 6)), "not a table of contents"),
    "chunk of other axes": (lambda table: chunk(table, 1, (12,), (12,)), "with 1 axes"),
    "chunk absurd": (lambda table: chunk(table, 1, (2, 0), (2**60, 6)), "exceeds the tensor"),
    "stored nowhere": (lambda table: table.storage_data.pop(MetadataIndex("a", (2, 0))), "does not locate the chunk"),
    "above": (lambda table: stored(table, relative_path="../__0_0.distcp"), "expected a name like"),
    "elsewhere": (lambda table: stored(table, relative_path="/tmp/__0_0.distcp"), "expected a name like"),
    "not a name": (lambda table: stored(table, relative_path="a\0.distcp"), "expected a name like"),
    "name too long": (lambda table: stored(table, relative_path="a" * 10**6 + ".distcp"), "expected a name like"),
    "file missing": (lambda table: stored(table, relative_path="__7_0.distcp"), "__7_0.distcp cannot be read: No such"),
    "beyond the file": (lambda table: stored(table, offset=10**6), "is torn"),
    "absurd place": (lambda table: stored(table, offset=2**61), "is torn"),
    "before the file": (lambda table: stored(table, offset=-1), "not a table of contents"),
    "place of a fraction": (lambda table: stored(table, offset=0.0), "uses the operation BINFLOAT"),
    "place of a truth": (lambda table: stored(table, offset=False), "not a table of contents"),
    "shorter than its elements": (lambda table: stored(table, length=47), "a chunk of 48 bytes that is stored in 47"),
    "cut": (lambda table: stored(table, length=1000), "torn or damaged"),
    "bytes of another chunk": (lambda table: stored(table, offset=64), "to two chunks"),
    "transformed": (lambda table: stored(table, transform_descriptors=["gzip"]), "extensions are not supported"),
    "no storage": (lambda table: setattr(table, "storage_data", None), "not a table of contents"),
    "no tensors": (lambda table: setattr(table, "state_dict_metadata", [1]), "not a table of contents"),
    "keys are tuples": (lambda table: table.storage_data.update({("a", 0): 1}), "is torn at byte"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_says_something_wrong_is_refused(name: str, folder: Path) -> None:
    edit, says = TABLES[name]
    change(folder, edit)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=says) as raised:
            read_all(folder)
        assert str(folder) in str(raised.value)
        assert len(str(raised.value)) < 1000
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_another_models_folder_is_refused(made: Path) -> None:
    folder = TensorFolder(made)
    with pytest.raises(CheckpointError, match="has a tensor 's', which this model does not have"):
        folder.check({"a": (4, 6), "b": (5,)})
    with pytest.raises(CheckpointError, match="has no tensor 'c'"):
        folder.read([empty("c", (2,))])


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_table_that_would_run_code_is_refused(folder: Path, tmp_path: Path) -> None:
    change(folder, lambda table: setattr(table, "planner_data", Bomb(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be used: the pickle names posix\.mkdir"):
        TensorFolder(folder)
    assert not (tmp_path / "ran").exists()


def torch_saved(value: Any) -> bytes:
    stream = BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def rezipped(edit: Callable[[str, bytes], bytes | None], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return the chunk of "b" with edited members."""
    stream = BytesIO()
    with zipfile.ZipFile(BytesIO(torch_saved(B))) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for name in old.namelist():
            content = edit(name.rpartition("/")[2], old.read(name))
            if content is not None:
                new.writestr(name, content)
    return stream.getvalue()


def replaced(member: str, content: bytes | None) -> bytes:
    return rezipped(lambda name, old: content if name == member else old)


def description(value: torch.Tensor) -> bytes:
    with zipfile.ZipFile(BytesIO(torch_saved(value))) as archive:
        return archive.read("archive/data.pkl")


WRONG_ORDER = b"big" if sys.byteorder == "little" else b"little"
CHUNKS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "code": (lambda path: torch_saved(Bomb(path)), "KeyError"),
    "code beside elements": (lambda path: replaced("data.pkl", pickle.dumps(Bomb(path), 2)), r"names posix\.mkdir"),
    "a list": (lambda _: torch_saved([B]), "its pickle does not describe a dense tensor"),
    "a parameter": (lambda _: torch_saved(torch.nn.Parameter(B)), r"names torch\._utils\._rebuild_parameter"),
    "sparse": (lambda _: torch_saved(B.to_sparse()), "must have 20 bytes|names torch|pickle has"),
    "more axes": (lambda _: torch_saved(B[None]), "its pickle does not describe a dense tensor"),
    "other dtype": (lambda _: torch_saved(B.int()), "its pickle describes another"),
    "other shape": (lambda _: replaced("data.pkl", description(B[:4])), "its pickle describes another"),
    "part of it": (lambda _: torch_saved(torch.arange(9.0)[2:7]), "must have 20 bytes of elements; found 36"),
    "stretched": (lambda _: torch_saved(torch.zeros(1).expand(5)), "must have 20 bytes of elements; found 4"),
    "pickle too long": (lambda _: replaced("data.pkl", b"N" * 20_000), "pickle has 20000 bytes; at most 16384"),
    "no elements": (lambda _: replaced("0", None), "KeyError"),
    "no description": (lambda _: replaced("data.pkl", None), "KeyError"),
    "compressed": (lambda _: rezipped(lambda _, old: old, zipfile.ZIP_DEFLATED), "is compressed"),
    "wrong order": (lambda _: replaced("byteorder", WRONG_ORDER.ljust(6)[: len(sys.byteorder)]), "byte order"),
    "no zip": (lambda _: b"x" * 1000, "BadZipFile"),
}


def put(folder: Path, content: bytes) -> None:
    """Replace the chunk of "b"."""
    (folder / "b.distcp").write_bytes(content)

    def edit(table: Metadata) -> None:
        place = table.storage_data[MetadataIndex("b", (0,))]
        place.relative_path, place.offset, place.length = "b.distcp", 0, len(content)

    change(folder, edit)


@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_that_is_no_tensor_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    content, says = CHUNKS[name]
    put(folder, content(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=rf"b\.distcp is torn or damaged at byte 0: .*({says})"):
        read_all(folder)
    assert not (tmp_path / "ran").exists()


def test_a_zip_with_an_absurd_table_of_members_is_not_read(tmp_path: Path) -> None:
    """A member takes 46 bytes on disk, and ten times as much in memory."""
    write(tmp_path, [[piece("w", torch.zeros(1 << 20))]])
    size = (tmp_path / FILES[1]).stat().st_size
    end = bytes(20) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9999, 9999, size - 22, 0, 0)
    with (tmp_path / FILES[1]).open("r+b") as file:
        file.seek(-len(end), os.SEEK_END)
        file.write(end)
    with pytest.raises(CheckpointError, match=rf"ValueError: a read of {size - 22} bytes at once, more than any chunk"):
        TensorFolder(tmp_path).read([empty("w", (1 << 20,))])


def test_a_chunk_that_is_one_is_read(folder: Path) -> None:
    put(folder, rezipped(lambda _, old: old))
    assert not is_refused_or_right(folder)
