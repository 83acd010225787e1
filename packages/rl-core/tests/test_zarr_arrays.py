"""Arrays as files: zarr reads our files, and we read zarr's."""

import numpy as np
import pytest
import zarr
from rl_core.files.zarr_arrays import METADATA, decode_array, decode_chunk, encode_array, plan_array
from zarr.storage import LocalStore

from rl_core.errors import BrokenEntryError
from rl_core.files import zarr_arrays

DTYPES = ("bool", "uint8", "int32", "int64", "float32")


def values_of(dtype, length):
    return np.random.default_rng(length).integers(0, 100, length).astype(dtype)


def encoded(values, *, compress):
    spec, files = encode_array(values, plan_array(values, compress=compress))
    return spec, {name: memoryview(bytearray(b"".join(parts))) for name, parts in files.items()}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(zarr_arrays, "MAX_CHUNK_BYTES", 4_096)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 400, 5_003])
def test_zarr_reads_what_is_written_and_writes_the_same_bytes(tmp_path, dtype, length, compress):
    values = values_of(dtype, length)
    spec, files = encoded(values, compress=compress)
    (tmp_path / "ours" / "c").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / "ours" / name).write_bytes(content)
    opened = zarr.open_array(LocalStore(tmp_path / "ours"), mode="r", zarr_format=3)
    assert opened.dtype == values.dtype
    assert np.array_equal(opened[:], values)

    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / METADATA).write_bytes(files[METADATA])
    made = zarr.open_array(LocalStore(tmp_path / "zarr"), mode="r+", zarr_format=3)
    made.with_config({"write_empty_chunks": True})[:] = values
    for index in range(spec.num_chunks):
        assert (tmp_path / "zarr" / "c" / str(index)).read_bytes() == files[f"c/{index}"]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 400, 5_003])
def test_what_is_written_is_read_and_can_be_changed(dtype, length, compress):
    values = values_of(dtype, length)
    spec, files = encoded(values, compress=compress)
    assert spec.num_chunks == -(-values.nbytes // 4_096)
    found = decode_array(files, spec, path="entry/x")
    assert found.dtype == values.dtype
    assert np.array_equal(found, values)
    found[:] = 0


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("compress", [False, True])
def test_every_changed_bit_of_a_chunk_is_found(compress):
    spec, files = encoded(values_of("int32", 2_000), compress=compress)
    chunk = files["c/1"]
    for place in range(0, len(chunk), 37):
        chunk[place] ^= 1 << place % 8
        with pytest.raises(BrokenEntryError, match=r"entry/x/c/1.*(checksum)"):
            decode_array(files, spec, path="entry/x")
        chunk[place] ^= 1 << place % 8
    assert np.array_equal(decode_array(files, spec, path="entry/x"), values_of("int32", 2_000))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("length", [1, 400, 5_003])
def test_a_chunk_is_read_by_itself(length, compress):
    values = values_of("int32", length)
    spec, files = encode_array(values, plan_array(values, compress=compress, chunk_bytes=1_000))
    parts = {name: memoryview(bytearray(b"".join(content))) for name, content in files.items()}
    chunks = [decode_chunk(parts[f"c/{index}"], index, spec, path="x") for index in range(spec.num_chunks)]
    assert max(chunk.nbytes for chunk in chunks) <= 1_000
    assert np.array_equal(np.concatenate(chunks), values)
    parts["c/0"][0] ^= 1
    with pytest.raises(BrokenEntryError, match="x/c/0"):
        decode_chunk(parts["c/0"], 0, spec, path="x")


def test_no_chunk_is_larger_than_is_read():
    values = np.zeros(2 * zarr_arrays.MAX_CHUNK_BYTES, dtype=np.uint8)
    assert plan_array(values, compress=False, chunk_bytes=1 << 40).chunk_length == zarr_arrays.MAX_CHUNK_BYTES
