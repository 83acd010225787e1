"""Hostile arrays with valid checksums: false metadata, chunks and content."""

import json
from functools import partial

import numpy as np
import pytest
from entry_forgery import BLOSC as HEADER
from skip_forgery import copy_entry, forge, put_records, read_in_child, records

LIMIT_MIB = 128
MAX_S = 5.0
NAME = "input_ids"


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


def chunks_of(length):
    return {"name": "regular", "configuration": {"chunk_shape": [length]}}


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
    forgery.files[f"{NAME}/.zarray"] = json.dumps(content).encode()


def header(**fields):
    return lambda forgery: forgery.change_header(NAME, **fields)


def header_plus(**fields):
    """Add to fields of a chunk's header."""

    def change(forgery):
        body = forgery.chunk(NAME)
        found = {name: int.from_bytes(body[(at := HEADER[name][0]) : at + 4], "little") for name in fields}
        forgery.change_header(NAME, **{name: found[name] + value for name, value in fields.items()})

    return change


def chunk(make):
    return lambda forgery: forgery.put_chunk(NAME, make(forgery.chunk(NAME)))


def big_claim(forgery):
    """Claim four gigabytes in the header, with a shape and chunks that agree."""
    length = (1 << 30) - 1
    forgery.change_metadata(NAME, shape=[length], chunk_grid=chunks_of(length))
    forgery.change_header(NAME, num_bytes=4 * length)


def ratio(forgery):
    """Claim a chunk of 16 MiB in a few bytes."""
    length = 1 << 22
    forgery.change_metadata(NAME, shape=[length], chunk_grid=chunks_of(length))
    forgery.change_header(NAME, num_bytes=4 * length)


def noise(forgery):
    """Replace a chunk's content with bytes that lz4 did not write."""
    body = forgery.chunk("records")
    forgery.put_chunk("records", body[:16] + b"\xff" * (len(body) - 16))


def put(name, values):
    return lambda forgery: forgery.put_array(name, np.array(values))


def offsets(first):
    def change(forgery):
        length, total = forgery.metadata("offsets")["shape"][0], forgery.metadata(NAME)["shape"][0]
        forgery.put_array("offsets", np.array([*first, *[total] * (length - len(first))], dtype=np.int64))

    return change


def experts(values, shapes):
    def change(forgery):
        forgery.put_array("routed_experts", np.array(values, dtype=np.int16))
        forgery.put_array("expert_shapes", np.array(shapes, dtype=np.int32))

    return change


def no_rows(forgery):
    """Store no prompts and no trajectories, but experts."""
    for name in ("input_ids", "policy_versions", "prompt_ids"):
        forgery.put_array(name, np.zeros(0, dtype=np.int32))
    forgery.put_array("loss_mask", np.zeros(0, dtype=bool))
    forgery.put_array("rollout_logprobs", np.zeros(0, dtype=np.float32))
    forgery.put_array("offsets", np.zeros(1, dtype=np.int64))
    forgery.put_array("prompt_offsets", np.zeros(1, dtype=np.int64))
    put_records(forgery, [])
    experts([1, 2], [])(forgery)


def with_records(content):
    return lambda forgery: put_records(forgery, content)


def first_row(**fields):
    def change(forgery):
        content = records()
        content[0]["sessions"][0]["trajectories"][0].update(fields)
        put_records(forgery, content)

    return change


def zeros(num_bytes):
    """Replace the records with zero bytes, which lz4 compresses 255 times."""
    return lambda forgery: forgery.put_array("records", np.zeros(num_bytes, dtype=np.uint8))


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
    "another array's dtype, with fitting chunks": (put(NAME, [1, 2, 3]), "data_type must be"),
    "pickle": (codecs({"name": "numcodecs.pickle"}), "codecs must be"),
    "pickle after": (codecs(after=[{"name": "numcodecs.pickle"}]), "codecs must be"),
    "pickle alone": (only_codecs("pickle"), "codecs must be"),
    "json2": (only_codecs("numcodecs.json2"), "codecs must be"),
    "vlen-utf8": (only_codecs("vlen-utf8"), "codecs must be"),
    "vlen-bytes": (only_codecs("vlen-bytes"), "codecs must be"),
    "gzip": (only_codecs("bytes", {"name": "gzip", "configuration": {"level": 5}}, "crc32c"), "codecs must be"),
    "zstd": (only_codecs("bytes", {"name": "zstd", "configuration": {"level": 5}}, "crc32c"), "codecs must be"),
    "zstd in blosc": (only_codecs("bytes", BLOSC, "crc32c"), "codecs must be"),
    "sharding": (only_codecs(SHARDING), "codecs must be"),
    "no codecs": (metadata(codecs=[]), "codecs must be"),
    "codecs that are a number": (metadata(codecs=3), "it must describe a zarr array with one axis"),
    "no checksum": (only_codecs({"name": "bytes", "configuration": {"endian": "little"}}), "codecs must be"),
    "big endian": (only_codecs({"name": "bytes", "configuration": {"endian": "big"}}, "crc32c"), "codecs must be"),
    "transposed": (codecs({"name": "transpose", "configuration": {"order": [0]}}), "codecs must be"),
    "two checksums": (codecs(after=[{"name": "crc32c"}]), "codecs must be"),
    "format 2": (metadata(zarr_format=2), "zarr_format must be"),
    "format 2 beside it": (format_2, "must not exist"),
    "a group": (metadata(node_type="group"), "node_type must be"),
    "a shape of 10**18": (metadata(shape=[10**18]), "it needs 4000000000000000000 bytes"),
    "a shape of 10**400": (metadata(shape=[10**400]), "it needs 4000"),
    "a shape of 2**63": (metadata(shape=[2**63]), "it needs"),
    "10**9 chunks of 1": (metadata(shape=[10**9], chunk_grid=chunks_of(1)), "in 1000000000 chunks"),
    "a shape of floats": (metadata(shape=[1.0]), "its shape is"),
    "a shape of truths": (metadata(shape=[True]), "its shape is"),
    "a shape below 0": (metadata(shape=[-1]), "its shape is"),
    "a shape far below 0": (metadata(shape=[-(2**63)]), "its shape is"),
    "a shape that is shorter": (metadata(shape=[3]), "expected 3"),
    "two axes": (metadata(shape=[1, 1]), "with one axis"),
    "no axes": (metadata(shape=[]), "with one axis"),
    "no shape": (metadata_without("shape"), "with one axis"),
    "chunks of 0": (metadata(chunk_grid=chunks_of(0)), "in chunks of 0"),
    "chunks of -1": (metadata(chunk_grid=chunks_of(-1)), "in chunks of -1"),
    "chunks of 10**18": (metadata(chunk_grid=chunks_of(10**18)), "expected chunks of at most"),
    "chunks of 10**400": (metadata(chunk_grid=chunks_of(10**400)), "expected chunks of at most"),
    "chunks of a text": (metadata(chunk_grid=chunks_of("1")), "its shape is"),
    "another grid": (metadata(chunk_grid={"name": "rectangular"}), "with one axis"),
    "keys that lead out": (
        metadata(chunk_key_encoding={"name": "default", "configuration": {"separator": "/../"}}),
        "chunk_key_encoding must be",
    ),
    "a fill value that is NaN": (metadata(fill_value=float("nan")), "fill_value must be"),
    "a fill value that is a float": (metadata(fill_value=0.0), "fill_value must be"),
    "a fill value that is a truth": (metadata(fill_value=False), "fill_value must be"),
    "attributes": (metadata(attributes={"a": 1}), "attributes must be"),
    "deep attributes": (metadata(attributes=json.loads("[" * 200 + "]" * 200)), "attributes must be"),
    "storage transformers": (metadata(storage_transformers=[{"name": "x"}]), "storage_transformers must be"),
    "an unknown field": (metadata(must_understand=True), "must_understand must be absent"),
    "an unknown field that says missing": (metadata(more="missing"), "more must be absent"),
    "an unknown field of kilobytes": (metadata(**{"\x1b" * 2_000: 1}), "must be absent"),
    "a field too few": (metadata_without("storage_transformers"), "storage_transformers must be"),
    "twice the same field": (lambda forgery: doubled(forgery), "it needs"),
    "no JSON": (raw_metadata(b"{"), "that is not a JSON object"),
    "no UTF-8": (raw_metadata(b'{"shape": "\xff"}'), "that is not a JSON object"),
    "a list": (raw_metadata(b"[]"), "that is not a JSON object"),
    "deep lists": (raw_metadata(b"[" * 16_000), "that is not a JSON object"),
    "deep lists, 100,000": (raw_metadata(b"[" * 100_000), "expected at most 16384"),
    "a number of 5,000 digits": (raw_metadata(b'{"shape": ' + b"9" * 5000 + b"}"), "that is not a JSON object"),
    "a megabyte": (raw_metadata(b" " * (1 << 20)), "expected at most 16384"),
    "a chunk that is too long": (chunk(lambda body: body + b"\0" * 8), "cannot reshape array"),
    "a chunk that is far too long": (chunk(lambda body: body + b"\0" * (1 << 20)), "expected at most"),
    "a chunk that is too short": (chunk(lambda body: body[:-4]), "cannot reshape array"),
    "a chunk that is empty": (chunk(lambda body: b""), "cannot reshape array"),
    "a chunk that is missing": (lambda forgery: forgery.files.pop(f"{NAME}/c/0") and None, "it is missing"),
    "a chunk without its checksum": (
        lambda forgery: forgery.files.update({f"{NAME}/c/0": b"\0" * len(forgery.files[f"{NAME}/c/0"])}),
        "cannot be decoded",
    ),
    "offsets that fall": (offsets([0, 30, 20]), "offsets must rise"),
    "offsets that run out": (offsets([0, 2**40]), "offsets must rise"),
    "offsets below 0": (offsets([-(2**63), 0]), "offsets must rise"),
    "experts of no trajectory": (no_rows, "experts"),
    "experts of a shape below 0": (experts([], [-1, 0] * 4), "a shape must not be negative"),
    "experts of too large a shape": (experts([1], [2**31 - 1] * 8), "routed_experts"),
    "experts without shapes": (put("routed_experts", np.zeros(2, np.int16)), "it has the arrays"),
    "records of zeros, 255 to 1": (zeros(100 << 20), "it cannot be read"),
    "records of blanks, 255 to 1": (with_records(b" " * (40 << 20)), "it cannot be read"),
    "records above the limit, 255 to 1": (zeros((1 << 28) + 1), "expected at most 268435456"),
    "records of very many lists": (with_records(b"[" + b"[]," * (12 << 20)), "may have 25165"),
    "records of deep lists": (with_records(b"[" * 100_000), "it cannot be read"),
    "a row too many": (lambda forgery: put_records(forgery, records() * 2), "it cannot be read"),
    "a reward of 400 digits": (first_row(reward=10**400), "it cannot be read"),
    "extras that are a list": (first_row(extras=[]), "it cannot be read"),
    "a reason of a megabyte": (first_row(finish_reason="\x1b" * 10**6), "it cannot be read"),
}
COMPRESSED = {
    "a header of gigabytes": (header(num_bytes=0xFFFFFFFF), "its header declares"),
    "a header and a shape of gigabytes": (big_claim, "expected chunks of at most"),
    "a header and a shape of 16 MiB": (ratio, "it needs 16777216 bytes"),
    "a header of nothing": (header(num_bytes=0), "its header declares"),
    "a header of one byte more": (header_plus(num_bytes=1), "its header declares"),
    "stored in more than there is": (header(compressed_bytes=0xFFFFFFFF), "its header declares"),
    "stored in one byte more": (header_plus(compressed_bytes=1), "its header declares"),
    "stored in less": (header_plus(compressed_bytes=-8), "its header declares"),
    "items of nothing": (header(typesize=0), "its header declares"),
    "blocks of nothing": (header(block_bytes=0), "its header declares"),
    "blocks of gigabytes": (header(block_bytes=0x7FFFFFFF), "its header declares"),
    "blosclz": (header(flags=0x04), "its header declares"),
    "zlib": (header(flags=0x64), "its header declares"),
    "zstd": (header(flags=0x84), "its header declares"),
    "bytes shuffled": (header(flags=0x21), "its header declares"),
    "a newer blosc": (header(version=5), "its header declares"),
    "a header alone": (chunk(lambda body: body[:15]), "its header declares"),
    "a chunk of nothing": (chunk(lambda body: b""), "its header declares"),
    "noise": (noise, "cannot be decoded"),
}
CASES = {**PLAIN, **{f"compressed: {name}": case for name, case in COMPRESSED.items()}}


def doubled(forgery):
    raw = json.dumps(forgery.metadata(NAME))
    forgery.put_metadata(NAME, (raw[:-1] + ', "shape": [1000000000]}').encode())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    roots = {}
    for number, (name, (change, _)) in enumerate(CASES.items()):
        roots[name] = tmp_path_factory.mktemp(f"case{number}")
        forge(copy_entry(roots[name], compress=name.startswith("compressed")), change)
    return read_in_child(roots, limit_mib=6 * LIMIT_MIB)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_array_is_refused(outcomes, name):
    assert name in outcomes, "the process that read it did not survive it"
    found = outcomes[name]
    assert found.error == "BrokenEntryError", found
    assert CASES[name][1] in found.message
    assert found.message.isprintable()
    assert len(found.message) < 1200
    assert found.events == []
    assert found.growth_mib < (5 if "255 to 1" in name else 1) * LIMIT_MIB
    assert found.processor_s < MAX_S


def spoilt_by_noise(rng, forgery):
    name = str(rng.choice([file.removesuffix("/c/0") for file in forgery.files if file.endswith("/c/0")]))
    body = np.frombuffer(forgery.chunk(name), dtype=np.uint8).copy()
    if len(body) > 16:
        start = int(rng.integers(16, len(body)))
        stop = int(rng.integers(start, len(body))) + 1
        body[start:stop] = rng.integers(0, 256, stop - start)
    forgery.put_chunk(name, body.tobytes())


def check_noise(tmp_path, seed, rounds):
    """Read entries with valid chunk headers and checksums, and with noise in the compressed content."""
    rng = np.random.default_rng(seed)
    roots = {str(number): tmp_path / f"noise{number}" for number in range(rounds)}
    for root in roots.values():
        forge(copy_entry(root), partial(spoilt_by_noise, rng))
    outcomes = read_in_child(roots, limit_mib=4 * LIMIT_MIB)
    assert set(outcomes) == set(roots), "a chunk of noise ended the process that read it"
    # Noise of the right length reads as ordinary content: a chunk with a valid checksum may hold any tokens.
    assert {found.error for found in outcomes.values()} <= {None, "BrokenEntryError"}
    assert "BrokenEntryError" in {found.error for found in outcomes.values()}
    assert max(found.growth_mib for found in outcomes.values()) < LIMIT_MIB
    assert not any(found.events for found in outcomes.values())


def test_noise_in_compressed_chunks_ends_no_process(tmp_path, seed):
    check_noise(tmp_path, seed, 40)


@pytest.mark.soak
def test_skip_cache_noise_in_compressed_chunks_ends_no_process(tmp_path, seed):
    check_noise(tmp_path, seed, 1000)
