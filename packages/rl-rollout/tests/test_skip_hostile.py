"""Hostile entries with valid checksums are refused quickly, in bounded memory, without executing anything."""

import json
import os
import socket
import stat

import pytest
from skip_forgery import KEY, file_spec, forge, make_entry, read_in_child
from skip_groups import assert_same_groups, make_groups

from rl_rollout.skip import EntryStore

LIMIT_MIB = 160
MAX_S = 5.0
DEEP = 100_000


def field(**changes):
    """Change fields of the manifest."""
    return lambda forgery: forgery.manifest.update(changes)


def spec(name, **changes):
    """Change fields of an array in the manifest."""
    return lambda forgery: forgery.specs[name].update(changes)


def raw_manifest(content):
    def change(forgery):
        forgery.put_manifest(content)
        return True

    return change


def renamed_array(name):
    """Rename the array input_ids in the manifest."""

    def change(forgery):
        forgery.specs[name] = forgery.specs.pop("input_ids")

    return change


def linked(name):
    """Replace a file or folder of the entry with a link to the same content."""

    def change(forgery):
        path = forgery.entry / name.replace("ARRAYS", forgery.manifest["arrays_folder"])
        forgery.seal()
        target = forgery.entry.parent / "elsewhere"
        path.rename(target)
        path.symlink_to(target)
        return True

    return change


def placed(make, *, name="ARRAYS/input_ids/c/0"):
    """Replace a file with the one that `make` creates."""

    def change(forgery):
        path = forgery.entry / name.replace("ARRAYS", forgery.manifest["arrays_folder"])
        forgery.seal()
        path.unlink()
        make(path)
        return True

    return change


def added(make, name="extra"):
    def change(forgery):
        forgery.seal()
        make(forgery.arrays / name)
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


def make_deep_folder(path):
    for _ in range(40):
        path /= "a"
    path.mkdir(parents=True)


def moved_out(folder):
    """Move the arrays to a folder outside the entry, and name it in the manifest."""

    def change(forgery):
        place = forgery.entry / folder
        place.parent.mkdir(parents=True, exist_ok=True)
        forgery.arrays.rename(place)
        forgery.manifest["arrays_folder"] = str(folder)

    return change


def whole_entry(make):
    def change(forgery):
        forgery.seal()
        elsewhere = forgery.entry.parent / "elsewhere"
        forgery.entry.rename(elsewhere)
        make(forgery.entry, elsewhere)
        return True

    return change


CASES = {
    "the arrays' folder is above": (moved_out("../arrays-0123456789abcdef"), "arrays are in"),
    "the arrays' folder is absolute": (field(arrays_folder="/etc"), "arrays are in"),
    "the arrays' folder is the entry": (field(arrays_folder="."), "arrays are in"),
    "the arrays' folder is empty": (field(arrays_folder=""), "arrays are in"),
    "the arrays' folder has a new line": (field(arrays_folder="arrays-0123456789abcdef\n"), "arrays are in"),
    "an array's name leads out": (renamed_array("../../input_ids"), "it has the array"),
    "an array's name is absolute": (renamed_array("/etc/passwd"), "it has the array"),
    "an array's name has a zero byte": (renamed_array("input_ids\0"), "it has the array"),
    "an array's name has no letters": (renamed_array(""), "it has the array"),
    "an array's name has a megabyte": (renamed_array("a" * (1 << 20)), "it has the array"),
    "object dtype": (spec("input_ids", dtype="object"), "it has the array"),
    "structured dtype": (spec("input_ids", dtype="i4,i4"), "it has the array"),
    "strings": (spec("input_ids", dtype="string"), "it has the array"),
    "a dtype of 2**31 bytes": (spec("input_ids", dtype="V2147483647"), "it has the array"),
    "another array's dtype": (spec("input_ids", dtype="int64"), "it has the array"),
    "a shape of 10**18": (spec("input_ids", shape=[10**18]), "its arrays need"),
    "a shape of 2**63": (spec("input_ids", shape=[2**63]), "its arrays need"),
    "a shape of 10**400": (spec("input_ids", shape=[10**400]), ""),
    "a shape below 0": (spec("input_ids", shape=[-1]), "its shape is"),
    "a shape far below 0": (spec("input_ids", shape=[-(2**63)]), "its shape is"),
    "two axes": (spec("input_ids", shape=[1, 1]), "not a manifest"),
    "no axes": (spec("input_ids", shape=[]), "not a manifest"),
    "chunks of 10**18": (spec("input_ids", chunk_length=10**18), "its shape is"),
    "chunks of 0": (spec("input_ids", chunk_length=0), "its shape is"),
    "chunks of -1": (spec("input_ids", chunk_length=-1), "its shape is"),
    "10**9 chunks of 1": (spec("input_ids", shape=[10**9], chunk_length=1), "it needs 1000000000 chunks"),
    "one chunk too few": (spec("input_ids", chunks=[]), "it needs 1 chunks"),
    "chunk files of less than nothing": (spec("input_ids", chunks=[file_spec(-5, 0)]), "cannot decode to"),
    "a chunk file of 2**62 bytes": (spec("input_ids", chunks=[file_spec(2**62, 0)]), "cannot decode to"),
    "a zarr.json of 2**40 bytes": (spec("input_ids", metadata=file_spec(2**40, 0)), "expected at most 16384"),
    "a zarr.json of less than nothing": (spec("input_ids", metadata=file_spec(-1, 0)), "must have -1 bytes"),
    "a flag that is a number": (spec("input_ids", is_compressed=1), "not a manifest"),
    "a size that is a text": (spec("input_ids", chunks=[file_spec("1", 0)]), "not a manifest"),
    "an unknown field": (field(surprise=1), "not a manifest"),
    "another format": (field(format="pickle"), "its format must be"),
    "a newer format": (field(format_version=2), "format_version"),
    "another entry's key": (field(key={"step": 2, "kind": "train", "part": 0}), "it belongs to 'train-00000002-0000'"),
    "a key of 10**400": (field(key={"step": 10**400, "kind": "train", "part": 0}), ""),
    "a key that leads out": (field(key={"step": 1, "kind": "../train", "part": 0}), "key needs a kind"),
    "a time of 10**400": (field(created_at=10**400), ""),
    "a time that is none": (field(created_at=float("nan")), "not a manifest"),
    "a time without end": (field(created_at=float("inf")), "not a manifest"),
    "a duration without end": (field(generate_s=float("inf")), "not a manifest"),
    "a duration below 0": (field(generate_s=-1.0), "not a manifest"),
    "counts that disagree": (
        field(counts={"groups": 2, "sessions": 4, "failed_sessions": 0, "trajectories": 4, "tokens": 1}),
        "as in its manifest",
    ),
    "a fingerprint that is a list": (field(fingerprint=[]), "not a manifest"),
    "no arrays": (field(arrays={}), "must not exist"),
    "a manifest that is empty": (raw_manifest(b""), "not a manifest"),
    "a manifest that is null": (raw_manifest(b"null"), "not a manifest"),
    "a manifest that is a list": (raw_manifest(b"[]"), "not a manifest"),
    "a manifest that is a number": (raw_manifest(b"1"), "not a manifest"),
    "a manifest that is a text": (raw_manifest(b'"manifest"'), "not a manifest"),
    "deep lists": (raw_manifest(b"[" * DEEP), "not a manifest"),
    "deep objects": (raw_manifest(b'{"manifest":' * DEEP), "not a manifest"),
    "deep lists that end": (raw_manifest(b'{"manifest":' + b"[" * DEEP + b"]" * DEEP + b"}"), "not a manifest"),
    "a number of a million digits": (
        raw_manifest(b'{"sha256": "", "manifest": ' + b"9" * 10**6 + b"}"),
        "not a manifest",
    ),
    "no UTF-8": (raw_manifest(b'{"sha256": "\xff\xfe", "manifest": {}}'), "not a manifest"),
    "UTF-16": (raw_manifest(json.dumps({"sha256": "", "manifest": {}}).encode("utf-16")), "not a manifest"),
    "a manifest of 65 MiB": (raw_manifest(b" " * (65 << 20)), "expected at most"),
    "a manifest of a terabyte with holes": (
        lambda forgery: (forgery.seal(), os.truncate(forgery.entry / "manifest.json", 1 << 40)) and True,
        "expected at most",
    ),
    "a manifest of very many lists": (raw_manifest(b"[" + b"[]," * (5 << 20)), "may have 10485762 values"),
    "as many objects as are read": (raw_manifest(b"[" + b",".join([b'{"a":1}'] * (1 << 18)) + b"]"), "not a manifest"),
    "a long text that takes four bytes a letter": (
        raw_manifest(b'"\\ud83e\\udde8' + b"a" * (15 << 20) + b'"'),
        "not a manifest",
    ),
    "a format_version of a megabyte": (field(format_version="\x1b" * (1 << 20)), "must have format_version 1; found"),
    "a kind of a megabyte": (field(key={"step": 1, "kind": "\x1b" * (1 << 20), "part": 0}), "key needs a kind"),
    "a manifest that is a link": (linked("manifest.json"), "it is a link"),
    "a chunk that is a link": (linked("ARRAYS/input_ids/c/0"), "it is a link"),
    "a zarr.json that is a link": (linked("ARRAYS/input_ids/zarr.json"), "it is a link"),
    "an array that is a link": (linked("ARRAYS/input_ids"), "it is a link"),
    "the arrays' folder is a link": (linked("ARRAYS"), "it is a link"),
    "a link to itself": (placed(lambda path: path.symlink_to(path)), "it is a link"),
    "a link to nothing": (placed(lambda path: path.symlink_to("nothing")), "it is a link"),
    "a link to the entry": (added(lambda path: path.symlink_to("../..")), "it is a link"),
    "a pipe for a chunk": (placed(os.mkfifo), "a pipe"),
    "a pipe for the manifest": (placed(os.mkfifo, name="manifest.json"), "a pipe"),
    "a device for a chunk": (placed(make_device), "a pipe, a socket or a device"),
    "a socket for a chunk": (placed(make_socket), "a pipe, a socket or a device"),
    "a folder for a chunk": (placed(lambda path: path.mkdir()), "is missing"),
    "a file too many": (added(lambda path: path.write_bytes(b"1")), "must not exist"),
    "a file whose name is no text": (
        added(lambda path: open(os.fsencode(path.parent) + b"/\xff\x1b[2J", "wb").close()),  # noqa: PTH123
        "must not exist",
    ),
    "folders in folders": (added(make_deep_folder), "deep"),
    "an entry that is a link": (whole_entry(lambda entry, good: entry.symlink_to(good)), "a link or not a folder"),
    "an entry that is a link to nothing": (whole_entry(lambda entry, _: entry.symlink_to("nothing")), "a link or not"),
    "an entry that is a link to itself": (whole_entry(lambda entry, _: entry.symlink_to(entry)), "a link or not"),
    "an entry that is a file": (whole_entry(lambda entry, _: entry.write_bytes(b"1")), "a link or not a folder"),
    "an entry that is a pipe": (whole_entry(lambda entry, _: os.mkfifo(entry)), "a link or not a folder"),
    "an entry with nothing in it": (whole_entry(lambda entry, _: entry.mkdir()), "it is missing"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    roots = {}
    for number, (name, (change, _)) in enumerate(CASES.items()):
        roots[name] = tmp_path_factory.mktemp(f"case{number}")
        forge(make_entry(roots[name], compress=number % 2 == 0), change)
    return read_in_child(roots, limit_mib=2 * LIMIT_MIB)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_entry_is_refused(outcomes, name):
    assert name in outcomes, "the process that read it did not survive it"
    found = outcomes[name]
    assert found.error == "BrokenEntryError", found
    assert CASES[name][1] in found.message
    assert found.message.isprintable()
    assert len(found.message) < 600
    assert found.events == []
    assert found.growth_mib < LIMIT_MIB
    assert found.processor_s < MAX_S


@pytest.mark.parametrize("compress", [False, True])
def test_an_entry_that_is_sealed_unchanged_is_read(tmp_path, compress):
    forge(make_entry(tmp_path, compress=compress), lambda forgery: None)
    assert_same_groups(EntryStore(str(tmp_path)).read(KEY).groups, make_groups())
