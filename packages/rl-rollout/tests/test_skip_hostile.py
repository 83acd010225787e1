"""Hostile entries with valid checksums are refused quickly, in bounded memory, without executing anything."""

import json
import os
import socket
import stat
import struct
import zipfile
from contextlib import suppress

import pytest
from skip_forgery import KEY, copy_entry, forge, make_entry, path_of, read_in_child
from skip_groups import assert_same_groups, make_groups

from rl_core.errors import BrokenEntryError, CacheMismatchError
from rl_rollout.skip import EntryKey, EntryStore, RolloutOrigin, SkipCache, SkipOptions

LIMIT_MIB = 160
MAX_S = 5.0
DEEP = 100_000
TB = 1 << 40
NAME = "input_ids"
COUNTS = {"groups": 2, "sessions": 4, "failed_sessions": 0, "trajectories": 4, "tokens": 1}


def field(**changes):
    """Change fields of the description."""
    return lambda forgery: forgery.describe(**changes)


def root(content):
    """Replace the root's zarr.json."""
    return lambda forgery: forgery.put_description(content)


def description(raw):
    """Replace the description by raw JSON."""
    return root(b'{"zarr_format": 3, "node_type": "group", "attributes": ' + raw + b"}")


def file(make):
    """Replace the entry by what `make` creates, with a good entry beside it."""

    def change(forgery):
        good = forgery.entry.with_name("good")
        forgery.entry.rename(good)
        make(forgery.entry, good)
        return True

    return change


def tail(make):
    """Change the end of the file."""

    def change(forgery):
        forgery.entry.write_bytes(make(forgery.entry.read_bytes()))
        return True

    return change


def zip64(content, *, num_bytes, place=None, where=0):
    """Add the end of a zip64, which declares the size of the directory."""
    end = len(content) - 22
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 17, 17, num_bytes, where)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end if place is None else place, 1)
    return content[:end] + record + locator + content[end:-10] + b"\xff" * 8 + b"\0\0"


def declared(name, **fields):
    """Let the zip's directory declare something else about a file."""
    return lambda forgery: forgery.directory.update({name: fields})


def overlapping(forgery):
    forgery.directory["records/c/0"] = {"header_offset": 0}


def share_bytes(forgery):
    """Declare a hundred files where the bytes of one are."""
    for name in (f"{NAME}/c/{number}" for number in range(1, 100)):
        forgery.files[name] = b""
        forgery.directory[name] = {"header_offset": 0, "file_size": 4096, "compress_size": 4096}


def renamed_array(name):
    def change(forgery):
        for old in [each for each in forgery.files if each.startswith(f"{NAME}/")]:
            forgery.files[f"{name}/{old.removeprefix(f'{NAME}/')}"] = forgery.files.pop(old)

    return change


def more(*names):
    return lambda forgery: forgery.files.update(dict.fromkeys(names, b"1"))


def many_files(forgery):
    forgery.files |= {f"{NAME}/c/{number}": b"" for number in range(1, 40_000)}


def as_many_files_as_are_read(forgery):
    forgery.files |= {f"{NAME}/c/{number}": b"" for number in range(1, 29_000)}


def repacked(method):
    """Compress the files in the zip."""

    def change(forgery):
        with zipfile.ZipFile(forgery.entry, "w", method) as archive:
            for name, content in forgery.files.items():
                archive.writestr(name, content)
        return True

    return change


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            bound.bind(f"/proc/self/fd/{here}/{path.name}")  # the full path is too long for a socket
        finally:
            os.close(here)


def make_directory(path, *, num_bytes):
    """Create a file of holes that ends like a zip with a directory of this size."""
    path.touch()
    os.truncate(path, num_bytes)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 17, 17, min(num_bytes, 0xFFFFFFFF), 0, 0)
    with path.open("ab") as stream:
        stream.write(end if num_bytes < TB else zip64(end, num_bytes=num_bytes, place=num_bytes))


def make_hole(path):
    path.touch()
    os.truncate(path, TB)


CASES = {
    "a link to a good entry": (file(lambda entry, good: entry.symlink_to(good)), "it must be a regular file"),
    "a link to nothing": (file(lambda entry, _: entry.symlink_to("nothing")), "it must be a regular file"),
    "a link to itself": (file(lambda entry, _: entry.symlink_to(entry)), "it must be a regular file"),
    "a folder": (file(lambda entry, _: entry.mkdir()), "it must be a regular file"),
    "a pipe": (file(lambda entry, _: os.mkfifo(entry)), "it must be a regular file"),
    "a device": (file(lambda entry, _: make_device(entry)), "it must be a regular file"),
    "a socket": (file(lambda entry, _: make_socket(entry)), "it must be a regular file"),
    "an empty file": (file(lambda entry, _: entry.touch()), "not a zip that this package wrote"),
    "a terabyte with holes": (file(lambda entry, _: make_hole(entry)), "not a zip that this package wrote"),
    "a directory of 3 GB": (file(lambda entry, _: make_directory(entry, num_bytes=3 << 30)), "its directory has"),
    "a directory of a terabyte": (file(lambda entry, _: make_directory(entry, num_bytes=TB)), "its directory has"),
    "a directory that is larger than the file": (
        tail(lambda content: zip64(content, num_bytes=TB)),
        "not a zip that this package wrote",
    ),
    "a directory of nothing": (tail(lambda content: zip64(content, num_bytes=0)), "it is missing"),
    "a directory that starts in front of the file": (
        tail(lambda content: zip64(content, num_bytes=9, where=TB)),
        "not a zip that this package wrote",
    ),
    "another directory than the last": (
        tail(lambda content: zip64(content, num_bytes=0, place=0)),
        "zarr.json: it is missing",
    ),
    "very many files": (many_files, "its directory has"),
    "as many files as are read": (as_many_files_as_are_read, "must not exist"),
    "deflated files": (repacked(zipfile.ZIP_DEFLATED), "its files must be stored once, uncompressed"),
    "files compressed by bzip2": (repacked(zipfile.ZIP_BZIP2), "its files must be stored once, uncompressed"),
    "files compressed by lzma": (repacked(zipfile.ZIP_LZMA), "its files must be stored once, uncompressed"),
    "a file of a newer zip": (declared(f"{NAME}/c/0", extract_version=255), "not a zip that this package wrote"),
    "files that share their bytes": (share_bytes, "its files must be stored once"),
    "a file of a terabyte": (declared(f"{NAME}/c/0", file_size=TB, compress_size=TB), "its files must be stored once"),
    "a file far away": (declared(f"{NAME}/c/0", header_offset=2**63 - 1), "must lie in the entry"),
    "a file behind the end": (declared(f"{NAME}/c/0", header_offset=TB), "must lie in the entry"),
    "a root behind the end": (declared("zarr.json", header_offset=TB), "must lie in the entry"),
    "a false checksum of the root": (declared("zarr.json", CRC=1), "its checksum differs"),
    "a false checksum of an array's form": (declared(f"{NAME}/zarr.json", CRC=1), "its checksum differs"),
    "a file in the place of another": (overlapping, "records"),
    "a file twice": (lambda forgery: forgery.doubled.append(f"{NAME}/c/0"), "stored once"),
    "the root twice": (lambda forgery: forgery.doubled.append("zarr.json"), "stored once"),
    "an array's name leads out": (renamed_array("../../input_ids"), "the arrays of such an entry are"),
    "an array's name is absolute": (renamed_array("/etc/passwd"), "the arrays of such an entry are"),
    "an array's name has a zero byte": (renamed_array("input_ids\0"), "stored once"),
    "an array's name has no letters": (renamed_array(""), "the arrays of such an entry are"),
    "an array's name has 60,000 letters": (renamed_array("\x1b" * 60_000), "the arrays of such an entry are"),
    "a file that leads out": (more("../../../tmp/x"), "the arrays of such an entry are"),
    "a file in an array that leads out": (more(f"{NAME}/../../x"), "must not exist"),
    "a file whose name is no text": (more(f"{NAME}/\x1b[2J\U000e0041"), "must not exist"),
    "no root": (lambda forgery: forgery.files.pop("zarr.json") and None, "zarr.json: it is missing"),
    "a root that is empty": (root(b""), "not a JSON object"),
    "a root that is null": (root(b"null"), "not a JSON object"),
    "a root that is a list": (root(b"[]"), "not a JSON object"),
    "a root that is a number": (root(b"1"), "not a JSON object"),
    "deep lists": (root(b"[" * DEEP), "not a JSON object"),
    "deep objects": (root(b'{"attributes":' * DEEP), "not a JSON object"),
    "deep lists that end": (description(b"[" * DEEP + b"]" * DEEP), "not a JSON object"),
    "a number of a million digits": (description(b"9" * 10**6), "not a JSON object"),
    "no UTF-8": (description(b'"\xff\xfe"'), "not a JSON object"),
    "UTF-16": (root(json.dumps({"attributes": {}}).encode("utf-16")), "not a JSON object"),
    "a root of 17 MiB": (root(b" " * (17 << 20)), "expected at most"),
    "very many lists": (root(b"[" + b"[]," * (1 << 19)), "may have 1048578 values"),
    "as many objects as are read": (
        description(b"[" + b'{"a":1},' * ((1 << 18) - 16) + b"1]"),
        "zarr group",
    ),
    "a long text that takes four bytes a letter": (
        description(b'{"format": "\\ud83e\\udde8' + b"a" * (15 << 20) + b'"}'),
        "its format must be a number; found",
    ),
    "a root that is an array": (root(b'{"zarr_format": 3, "node_type": "array", "attributes": {}}'), "zarr group"),
    "a root of zarr 2": (root(b'{"zarr_format": 2, "node_type": "group", "attributes": {}}'), "zarr group"),
    "a root with more": (
        root(b'{"zarr_format": 3, "node_type": "group", "attributes": {}, "consolidated_metadata": {}}'),
        "zarr group",
    ),
    "no description": (root(b'{"zarr_format": 3, "node_type": "group"}'), "zarr group"),
    "a description that is a list": (root([]), "zarr group"),
    "a description that is empty": (root({}), "its format must be a number; found None"),
    "another format": (field(format="pickle"), "its format must be a number; found 'pickle'"),
    "a format that is true": (field(format=True), "its format must be a number; found True"),
    "a format of a megabyte": (field(format="\x1b" * (1 << 20)), "its format must be a number; found"),
    "an unknown field": (field(surprise=1), "not one of rollouts"),
    "an unknown field of a megabyte": (field(**{"\x1b" * (1 << 20): 1}), "not one of rollouts"),
    "another entry's key": (field(key={"step": 2, "kind": "train", "part": 0}), "it belongs to train-00000002-0000"),
    "a key of 10**400": (field(key={"step": 10**400, "kind": "train", "part": 0}), "not one of rollouts"),
    "a key that leads out": (field(key={"step": 1, "kind": "../train", "part": 0}), "key needs a kind"),
    "a kind of a megabyte": (field(key={"step": 1, "kind": "\x1b" * (1 << 20), "part": 0}), "key needs a kind"),
    "a time of 10**400": (field(created_at=10**400), "not one of rollouts"),
    "a time that is none": (field(created_at=float("nan")), "not one of rollouts"),
    "a time without end": (field(created_at=float("inf")), "not one of rollouts"),
    "a duration without end": (field(generate_s=float("inf")), "not one of rollouts"),
    "a duration below 0": (field(generate_s=-1.0), "not one of rollouts"),
    "counts that disagree": (field(counts=COUNTS), "it must have Counts"),
    "counts of 10**400": (field(counts={**COUNTS, "tokens": 10**400}), "not one of rollouts"),
    "counts below 0": (field(counts={**COUNTS, "tokens": -1}), "not one of rollouts"),
    "a fingerprint that is a list": (field(fingerprint=[]), "not one of rollouts"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    roots = {}
    for number, (name, (change, _)) in enumerate(CASES.items()):
        roots[name] = tmp_path_factory.mktemp(f"case{number}")
        forge(copy_entry(roots[name], compress=number % 2 == 0), change)
    return read_in_child(roots, limit_mib=2 * LIMIT_MIB)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_entry_is_refused(outcomes, name):
    assert name in outcomes, "the process that read it did not survive it"
    found = outcomes[name]
    assert found.error == "BrokenEntryError", found
    assert CASES[name][1] in found.message
    assert found.message.isprintable()
    assert len(found.message) < 1000
    assert found.events == []
    assert found.growth_mib < LIMIT_MIB
    assert found.processor_s < MAX_S


HARMLESS = {
    "a comment": tail(lambda content: content[:-2] + b"\1\0x"),
    "another compression": declared(f"{NAME}/c/0", compress_type=99),
    "another compressed size": declared(f"{NAME}/c/0", compress_size=TB),
    "encryption": declared(f"{NAME}/c/0", flag_bits=1),
    "a patch": declared(f"{NAME}/c/0", flag_bits=0x20),
    "another checksum of a chunk, which has its own": declared(f"{NAME}/c/0", CRC=1),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_the_zip_declares_and_nobody_uses_changes_nothing(tmp_path, name):
    forge(make_entry(tmp_path), HARMLESS[name])
    assert_same_groups(EntryStore(str(tmp_path)).read(KEY).groups, make_groups())


@pytest.mark.parametrize("compress", [False, True])
def test_an_entry_that_is_saved_unchanged_is_read(tmp_path, compress):
    forge(make_entry(tmp_path, compress=compress), lambda forgery: None)
    assert_same_groups(EntryStore(str(tmp_path)).read(KEY).groups, make_groups())


def test_an_entry_under_another_name_is_found(tmp_path):
    make_entry(tmp_path).rename(path_of(tmp_path, EntryKey(step=2)))
    store = EntryStore(str(tmp_path))
    assert store.entries() == [EntryKey(step=2)]
    with pytest.raises(BrokenEntryError, match="it belongs to train-00000001-0000"):
        store.read(EntryKey(step=2))


@pytest.mark.parametrize("depth", [100, 900, 5_000])
def test_a_deep_fingerprint_is_a_difference_or_a_broken_entry(tmp_path, depth):
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    entry = make_entry(tmp_path)
    forge(entry, lambda forgery: forgery.put_description(forgery.files["zarr.json"].replace(b'{"seed": 1}', deep)))
    origin = RolloutOrigin(policy=None, tokenizer=None, sampling=None, group_size=2, loop=None)
    cache = SkipCache(SkipOptions(enabled=True, directory=str(tmp_path)))
    with suppress(CacheMismatchError):
        assert cache.find(KEY, [], origin) is None  # set aside
