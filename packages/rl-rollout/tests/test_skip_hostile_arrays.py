"""Hostile arrays with valid checksums: false metadata, chunks and content."""

import json
import os
import struct

import numpy as np
import pytest
from skip_forgery import KEY, forge, make_entry, read_in_child

from rl_core.errors import BrokenEntryError
from rl_rollout.skip import EntryStore

LIMIT_MIB = 128
MAX_S = 5.0
NAME = "input_ids"
GIB = 1 << 30


def metadata(**fields):
    return lambda forgery: forgery.change_metadata(NAME, **fields)


def metadata_without(field):
    def change(forgery):
        content = forgery.metadata(NAME)
        del content[field]
        forgery.put_metadata(NAME, content)

    return change


def raw_metadata(content):
    return lambda forgery: forgery.put_metadata(NAME, content)


def codecs(*before, after=()):
    """Add codecs around the real ones."""

    def change(forgery):
        forgery.change_metadata(NAME, codecs=[*before, *forgery.metadata(NAME)["codecs"], *after])

    return change


def only_codecs(*names):
    return metadata(codecs=[name if isinstance(name, dict) else {"name": name} for name in names])


def format_2(forgery):
    """Add metadata of zarr format 2, with object dtype and a pickle filter, beside format 3's."""
    content = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "|O", "filters": [{"id": "pickle"}]}
    forgery.seal()
    (forgery.arrays / NAME / ".zarray").write_text(json.dumps(content))
    return True


def header(**fields):
    """Change the header of a compressed chunk."""
    places = {"version": (0, "<B"), "codec": (1, "<B"), "flags": (2, "<B"), "typesize": (3, "<B")}
    places |= {"num_bytes": (4, "<I"), "block_bytes": (8, "<I"), "compressed_bytes": (12, "<I")}

    def change(forgery):
        body = bytearray(forgery.chunk(NAME))
        for name, value in fields.items():
            place, code = places[name]
            struct.pack_into(code, body, place, value)
        forgery.put_chunk(NAME, bytes(body))

    return change


def chunk(make):
    return lambda forgery: forgery.put_chunk(NAME, make(forgery.chunk(NAME)))


def big_claim(forgery):
    """Claim four gigabytes in the header, with a shape and chunks that agree."""
    forgery.specs[NAME].update(shape=[GIB - 1], chunk_length=GIB - 1)
    header(num_bytes=4 * (GIB - 1))(forgery)


def noise(forgery):
    """Replace a chunk's content with bytes that lz4 did not write."""
    body = forgery.chunk("records")
    forgery.put_chunk("records", body[:16] + b"\xff" * (len(body) - 16))


def zeros(num_bytes):
    """Replace the records with zero bytes, which lz4 compresses 255 times."""
    return lambda forgery: forgery.put_array("records", np.zeros(num_bytes, dtype=np.uint8), compress=True)


def blanks(num_bytes):
    return lambda forgery: forgery.put_records(b" " * num_bytes)


BLOSC = {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 5, "shuffle": "noshuffle", "typesize": 4}}
SHARDING = {
    "name": "sharding_indexed",
    "configuration": {"chunk_shape": [1], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]},
}
PLAIN = {
    "object dtype": (metadata(data_type="object"), "data_type must be"),
    "strings": (metadata(data_type="string"), "data_type must be"),
    "bytes of any length": (metadata(data_type="variable_length_bytes"), "data_type must be"),
    "structured dtype": (metadata(data_type={"name": "structured", "configuration": {"fields": []}}), "data_type"),
    "raw bytes": (metadata(data_type="r2147483648"), "data_type must be"),
    "another dtype": (metadata(data_type="int64"), "data_type must be"),
    "pickle": (codecs({"name": "numcodecs.pickle"}), "codecs must be"),
    "pickle alone": (only_codecs("pickle"), "codecs must be"),
    "json2": (only_codecs("numcodecs.json2"), "codecs must be"),
    "vlen-utf8": (only_codecs("vlen-utf8"), "codecs must be"),
    "vlen-bytes": (only_codecs("vlen-bytes"), "codecs must be"),
    "gzip": (only_codecs("bytes", {"name": "gzip", "configuration": {"level": 5}}, "crc32c"), "codecs must be"),
    "zstd": (only_codecs("bytes", {"name": "zstd", "configuration": {"level": 5}}, "crc32c"), "codecs must be"),
    "zstd in blosc": (only_codecs("bytes", BLOSC, "crc32c"), "codecs must be"),
    "sharding": (only_codecs(SHARDING), "codecs must be"),
    "no checksum": (only_codecs({"name": "bytes", "configuration": {"endian": "little"}}), "codecs must be"),
    "big endian": (only_codecs({"name": "bytes", "configuration": {"endian": "big"}}, "crc32c"), "codecs must be"),
    "transposed": (codecs({"name": "transpose", "configuration": {"order": [0]}}), "codecs must be"),
    "two checksums": (codecs(after=[{"name": "crc32c"}]), "codecs must be"),
    "format 2": (metadata(zarr_format=2), "zarr_format must be"),
    "format 2 beside it": (format_2, "must not exist"),
    "a group": (metadata(node_type="group"), "node_type must be"),
    "a shape of 10**18": (metadata(shape=[10**18]), "shape must be"),
    "a shape of 2**64 + what it is": (lambda forgery: shape_plus(forgery, 2**64), "shape must be"),
    "a shape of floats": (lambda forgery: forgery.change_metadata(NAME, shape=floats(forgery)), "shape must be"),
    "a shape below 0": (metadata(shape=[-1]), "shape must be"),
    "two axes": (metadata(shape=[1, 1]), "shape must be"),
    "another grid": (metadata(chunk_grid={"name": "rectangular"}), "chunk_grid must be"),
    "keys that lead out": (
        metadata(chunk_key_encoding={"name": "default", "configuration": {"separator": "/../"}}),
        "chunk_key_encoding must be",
    ),
    "a fill value that is NaN": (metadata(fill_value=float("nan")), "fill_value must be"),
    "a fill value that is a float": (metadata(fill_value=0.0), "fill_value must be"),
    "a fill value that is a truth": (metadata(fill_value=False), "fill_value must be"),
    "attributes": (metadata(attributes={"a": 1}), "attributes must be"),
    "deep attributes": (raw_metadata(b'{"attributes":' + b"[" * 500 + b"]" * 500 + b"}"), "must be an object with"),
    "storage transformers": (metadata(storage_transformers=[{"name": "x"}]), "storage_transformers must be"),
    "an unknown field": (metadata(must_understand=True), "must be an object with"),
    "a field too few": (metadata_without("storage_transformers"), "must be an object with"),
    "twice the same field": (lambda forgery: doubled(forgery), "shape must be"),
    "no JSON": (raw_metadata(b"{"), "it is not JSON"),
    "no UTF-8": (raw_metadata(b'{"shape": "\xff"}'), "it is not JSON"),
    "a list": (raw_metadata(b"[]"), "must be an object with"),
    "deep lists": (raw_metadata(b"[" * 16_000), "it is not JSON"),
    "deep lists, 100,000": (raw_metadata(b"[" * 100_000), "expected at most 16384"),
    "a number of 5,000 digits": (raw_metadata(b'{"shape": ' + b"9" * 5000 + b"}"), "it is not JSON"),
    "a megabyte": (raw_metadata(b" " * (1 << 20)), "expected at most 16384"),
    "a chunk that is too long": (chunk(lambda body: body + b"\0" * 8), "which cannot decode to"),
    "a chunk that is too short": (chunk(lambda body: body[:-4]), "which cannot decode to"),
    "a chunk that is empty": (chunk(lambda body: b""), "which cannot decode to"),
    "offsets that fall": (lambda forgery: offsets(forgery, [0, 30, 20]), "offsets must rise"),
    "offsets that run out": (lambda forgery: offsets(forgery, [0, 2**40]), "offsets must rise"),
    "offsets below 0": (lambda forgery: offsets(forgery, [-(2**63), 0]), "offsets must rise"),
    "records of zeros, 255 to 1": (zeros(100 << 20), "it cannot be read"),
    "records of blanks, 255 to 1": (blanks(40 << 20), "it cannot be read"),
    "records above the limit, 255 to 1": (zeros((1 << 28) + 1), "expected at most 268435456"),
    "records of very many lists": (lambda forgery: forgery.put_records(b"[" + b"[]," * (12 << 20)), "may have 25165"),
    "records of deep lists": (lambda forgery: forgery.put_records(b"[" * 100_000), "it cannot be read"),
    "a row too many": (lambda forgery: forgery.put_records(forgery.records() * 2), "expected 9"),
    "a reward of 400 digits": (lambda forgery: first_row(forgery, reward=10**400), "it cannot be read"),
    "extras that are a list": (lambda forgery: first_row(forgery, extras=[]), "it cannot be read"),
    "a reason of a megabyte": (lambda forgery: first_row(forgery, finish_reason="\x1b" * 10**6), "finish_reason must"),
}
COMPRESSED = {
    "a header of gigabytes": (header(num_bytes=0xFFFFFFFF), "its header declares"),
    "a header and a shape of gigabytes": (big_claim, "expected chunks of at most"),
    "a header of nothing": (header(num_bytes=0), "it must be compressed by lz4 in whole blocks"),
    "a header of one byte more": (lambda forgery: longer_header(forgery), "its header declares"),
    "stored in more than there is": (header(compressed_bytes=0xFFFFFFFF), "its header declares"),
    "items of nothing": (header(typesize=0), "its header declares"),
    "blocks of nothing": (header(block_bytes=0), "in whole blocks"),
    "blocks of gigabytes": (header(block_bytes=0x7FFFFFFF), "in whole blocks"),
    "blosclz": (header(flags=0x04), "it must be compressed by lz4"),
    "zlib": (header(flags=0x64), "it must be compressed by lz4"),
    "zstd": (header(flags=0x84), "it must be compressed by lz4"),
    "bytes shuffled": (header(flags=0x21), "it must be compressed by lz4"),
    "a newer blosc": (header(version=5), "it must be compressed by lz4"),
    "a header alone": (chunk(lambda body: body[:15]), ""),
    "noise": (noise, "it cannot be decoded"),
}
CASES = {**PLAIN, **{f"compressed: {name}": case for name, case in COMPRESSED.items()}}


def shape_plus(forgery, more):
    forgery.change_metadata(NAME, shape=[forgery.metadata(NAME)["shape"][0] + more])


def floats(forgery):
    return [float(length) for length in forgery.metadata(NAME)["shape"]]


def doubled(forgery):
    raw = json.dumps(forgery.metadata(NAME))
    forgery.put_metadata(NAME, (raw[:-1] + ', "shape": [1000000000]}').encode())


def longer_header(forgery):
    (num_bytes,) = struct.unpack_from("<I", forgery.chunk(NAME), 4)
    header(num_bytes=num_bytes + 1)(forgery)


def offsets(forgery, first):
    length = forgery.specs["offsets"]["shape"][0]
    total = forgery.specs[NAME]["shape"][0]
    values = [*first, *[total] * (length - len(first))]
    forgery.put_array("offsets", np.array(values, dtype=np.int64))


def first_row(forgery, **fields):
    records = forgery.records()
    records[0]["sessions"][0]["trajectories"][0].update(fields)
    forgery.put_records(records)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    roots = {}
    for number, (name, (change, _)) in enumerate(CASES.items()):
        roots[name] = tmp_path_factory.mktemp(f"case{number}")
        forge(make_entry(roots[name], compress=name.startswith("compressed")), change)
    return read_in_child(roots, limit_mib=4 * LIMIT_MIB)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_array_is_refused(outcomes, name):
    assert name in outcomes, "the process that read it did not survive it"
    found = outcomes[name]
    assert found.error == "BrokenEntryError", found
    assert CASES[name][1] in found.message
    assert found.message.isprintable()
    assert len(found.message) < 1000
    assert found.events == []
    assert found.growth_mib < (3.5 if "255 to 1" in name else 1) * LIMIT_MIB
    assert found.processor_s < MAX_S


def test_an_entry_that_would_take_more_memory_than_is_given_is_refused_before_it_is_read(tmp_path):
    entry = make_entry(tmp_path, compress=True)
    forge(entry, zeros(20 << 20))
    assert sum(path.stat().st_size for path in entry.rglob("*") if path.is_file()) < 1 << 20
    with pytest.raises(BrokenEntryError, match=r"its arrays need \d+ bytes; the limit is 1000000"):
        EntryStore(str(tmp_path), max_entry_bytes=1_000_000).read(KEY)


def noise_roots(tmp_path, seed, rounds):
    """Make entries with valid chunk headers and checksums, and with noise in the compressed content."""
    rng = np.random.default_rng(seed)
    roots = {}
    for number in range(rounds):
        root = tmp_path / f"noise{number}"
        entry = make_entry(root, compress=True)

        def change(forgery):
            name = str(rng.choice(list(forgery.specs)))
            body = np.frombuffer(forgery.chunk(name), dtype=np.uint8).copy()
            if len(body) > 16:
                start = int(rng.integers(16, len(body)))
                stop = int(rng.integers(start, len(body))) + 1
                body[start:stop] = rng.integers(0, 256, stop - start)
            forgery.put_chunk(name, body.tobytes())

        forge(entry, change)
        roots[str(number)] = root
    return roots


def check_noise(roots):
    outcomes = read_in_child(roots, limit_mib=4 * LIMIT_MIB)
    assert set(outcomes) == set(roots), "a chunk of noise ended the process that read it"
    # Noise of the right length reads as ordinary content: a chunk with a valid checksum may hold any tokens.
    assert {found.error for found in outcomes.values()} <= {None, "BrokenEntryError"}
    assert "BrokenEntryError" in {found.error for found in outcomes.values()}
    assert max(found.growth_mib for found in outcomes.values()) < LIMIT_MIB
    assert not any(found.events for found in outcomes.values())


def test_noise_in_compressed_chunks_ends_no_process(tmp_path, seed):
    check_noise(noise_roots(tmp_path, seed, 40))


@pytest.mark.soak
def test_skip_cache_noise_in_compressed_chunks_ends_no_process(tmp_path, seed):
    check_noise(noise_roots(tmp_path, seed, 1000))


def test_a_huge_file_with_holes_is_refused_by_its_size(tmp_path):
    entry = make_entry(tmp_path, compress=False)
    (chunk_file,) = entry.glob(f"arrays-*/{NAME}/c/0")
    os.truncate(chunk_file, 1 << 40)
    with pytest.raises(BrokenEntryError, match="it has 1099511627776 bytes"):
        EntryStore(str(tmp_path)).read(KEY)
