"""Entries of arrays: zips of zarr arrays in a folder or at a URL, each complete or absent."""

import errno
import fcntl
import json
import os
import random
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pytest
import zarr
from entry_forgery import Forgery, damaged, place_in
from zarr.storage import ZipStore

from rl_core.errors import BrokenEntryError, CacheError, MissingExtraError
from rl_core.files import array_entries, entry_zip
from rl_core.files.array_entries import SUFFIX, EntryFolder, EntryTooLargeError

DTYPES = {"truths": "bool", "octets": "uint8", "ids": "int32", "offsets": "int64", "logprobs": "float32"}
NAME, DESCRIPTION = "train-1", {"made_by": "a test", "numbers": [1, 1.0, True, None, float("inf")]}
DAMAGES, LONG_DAMAGES = 1_000, 5_000


def values_of(dtype, length):
    return np.random.default_rng(length).integers(0, 100, length).astype(dtype)


def arrays_of(length):
    return {name: values_of(dtype, length) for name, dtype in DTYPES.items()}


def write(folder, name=NAME, *, length=400, description=None, **options):
    return folder.write(name, description or DESCRIPTION, arrays_of(length).items(), **options)


def read(folder, name=NAME):
    """Return an entry's description and arrays; None if it does not exist."""
    with folder.open(name) as entry:
        return None if entry is None else (entry.description, entry.read(DTYPES))


def is_same(found, expected=400):
    """Return True if an entry has this description and these arrays, or those of this length."""
    description, arrays = found
    expected = expected if isinstance(expected, dict) else arrays_of(expected)
    return (
        json.dumps(description) == json.dumps(DESCRIPTION)
        and arrays.keys() == expected.keys()
        and all(
            arrays[name].dtype == each.dtype and arrays[name].tobytes() == each.tobytes()
            for name, each in expected.items()
        )
    )


def path_in(root, name=NAME):
    return Path(root, f"{name}{SUFFIX}")


def leftovers(root):
    return sorted(path.name for path in Path(root).glob(".*"))


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    return EntryFolder(str(tmp_path / "cache") if request.param == "local" else f"memory://{uuid4().hex}/cache")


@pytest.fixture
def local(tmp_path):
    return EntryFolder(str(tmp_path))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(entry_zip, "MAX_CHUNK_BYTES", 1_000)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("length", [0, 1, 400, 5_003])
def test_an_entry_comes_back_as_it_was_written(folder, length, compress, small_chunks):
    assert read(folder) is None
    assert not folder.exists()
    folder.prepare()
    size = write(folder, length=length, compress=compress)
    assert is_same(read(folder), length)
    assert folder.sizes() == {NAME: size}
    assert (folder.names(), folder.others(), folder.broken(), folder.leftovers()) == ([NAME], [], {}, {})
    assert folder.exists()
    with folder.open(NAME) as entry:
        assert (entry.path, entry.size_bytes) == (folder.path_of(NAME), size)
    _, found = read(folder)
    found["ids"][:] = 0  # arrays can be changed


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5_003])
def test_zarr_opens_what_is_written_and_makes_the_same_files(local, tmp_path, length, compress, small_chunks):
    write(local, length=length, compress=compress)
    files = Forgery(path_in(tmp_path)).files
    for name, values in arrays_of(length).items():
        opened = zarr.open_array(ZipStore(path_in(tmp_path)), path=name, mode="r")
        assert opened.dtype == values.dtype
        assert np.array_equal(opened[:], values)
        made = zarr.open_group(tmp_path / "zarr").create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=opened.chunks,
            filters=None,
            serializer=opened.metadata.codecs[0],
            compressors=opened.metadata.codecs[1:],
            config={"write_empty_chunks": True},
        )
        made[:] = values
        theirs = {
            str(file.relative_to(tmp_path / "zarr")): file.read_bytes()
            for file in (tmp_path / "zarr" / name).rglob("*")
            if file.is_file()
        }
        assert theirs == {file: content for file, content in files.items() if file.startswith(f"{name}/")}
    assert zarr.open_group(ZipStore(path_in(tmp_path)), mode="r").attrs["made_by"] == "a test"


def test_zeros_and_large_arrays_have_all_their_chunks(local, tmp_path):
    values = np.zeros(2 * entry_zip.MAX_CHUNK_BYTES + 1, dtype=np.uint8)
    local.write(NAME, {}, [("octets", values)])
    assert sorted(Forgery(path_in(tmp_path)).files) == [
        *(f"octets/c/{index}" for index in range(3)),
        "octets/zarr.json",
        "zarr.json",
    ]
    assert not read(local)[1]["octets"].any()


def test_equal_arrays_make_equal_files(local, tmp_path, small_chunks):
    for name in ("a", "b"):
        write(local, name, length=20_000)
    assert path_in(tmp_path, "a").read_bytes() == path_in(tmp_path, "b").read_bytes()


def test_an_entry_stays_unless_it_is_replaced(folder):
    write(folder)
    assert write(folder, length=9) is None
    assert is_same(read(folder))
    with folder.open(NAME) as entry:
        assert write(folder, length=9, replace=True) == folder.sizes()[NAME]
        if folder.is_local:  # what was opened stays readable
            assert is_same((entry.description, entry.read(DTYPES)))
    assert is_same(read(folder), 9)
    folder.remove(NAME)
    folder.remove(NAME)
    assert (folder.names(), read(folder)) == ([], None)


def test_an_entry_that_is_set_aside_is_whole_below_broken(folder):
    size = write(folder)
    write(folder, "other")
    aside = folder.set_aside(NAME)
    assert aside.startswith(folder.path_of(f"broken/{NAME}-").removesuffix(SUFFIX))
    (name,) = folder.broken()
    assert folder.path_of(f"broken/{name}") == aside
    assert (folder.names(), folder.others(), folder.broken()) == (["other"], ["broken"], {name: size})
    assert is_same(read(folder, f"broken/{name}"))
    assert folder.set_aside(NAME) is None
    folder.remove(f"broken/{name}")
    assert folder.broken() == {}


def test_limits_of_size_leave_nothing(tmp_path):
    folder = EntryFolder(str(tmp_path), max_entry_bytes=7_300)
    size = write(folder)
    with pytest.raises(EntryTooLargeError, match=f"other would exceed max_bytes = {size - 1}"):
        write(folder, "other", max_bytes=size - 1)
    assert write(folder, "other", max_bytes=size) == size
    with pytest.raises(CacheError, match=r"need 8100 bytes or more; at most 7300"):
        write(folder, "large", length=450)
    for description in ({"x": "y" * (1 << 24)}, {"x": [0] * 600_000}):
        with pytest.raises(CacheError, match="an entry's description has"):
            folder.write("large", description, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"other{SUFFIX}", f"{NAME}{SUFFIX}"]
    small = EntryFolder(str(tmp_path), max_entry_bytes=6_000)
    with pytest.raises(BrokenEntryError, match="its arrays need 7200 bytes; the limit is 6000"):
        read(small)


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_stays(local, tmp_path):
    code = (
        "import os; from rl_core.files.array_entries import EntryFolder\n"
        f"with EntryFolder({str(tmp_path)!r})._new_file('dead') as (stream, _):\n"
        "    stream.write(b'12345'); stream.flush(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    (dead,) = leftovers(tmp_path)
    with local._new_file("alive") as (_, alive):
        (tmp_path / ".other").write_text("mine")
        os.mkfifo(tmp_path / ".writing-pipe")  # must not block
        (tmp_path / ".writing-folder").mkdir()
        assert local.names() == []
        assert {name: size for name, size in local.leftovers().items() if name == dead} == {dead: 5}
        EntryFolder(str(tmp_path)).prepare()
        assert leftovers(tmp_path) == [".other", Path(alive).name, ".writing-folder"]
    assert leftovers(tmp_path) == [".other", ".writing-folder"]


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(local, tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def removed_first(descriptor, operation):
        if not removed:
            removed.append(None)
            EntryFolder(str(tmp_path)).prepare()
        lock(descriptor, operation)

    monkeypatch.setattr(array_entries.fcntl, "flock", removed_first)
    write(local)
    assert removed
    assert is_same(read(local))
    assert leftovers(tmp_path) == []


def test_without_hard_links_an_entry_still_stays(local, monkeypatch):
    def refused(self, target):
        raise PermissionError("no hard links")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    assert write(local) is not None
    assert write(local, length=9) is None
    assert is_same(read(local))


def test_a_writer_that_fails_leaves_nothing(folder):
    def arrays():
        yield "ids", values_of("int32", 9)
        raise KeyError("stopped")

    for failing in (arrays(), [("ids", "no array")]):
        with pytest.raises(CacheError, match=r"could not be stored: .*Make room, or choose another folder"):
            folder.write(NAME, {}, failing)
        with pytest.raises(CacheError, match="could not be stored: TypeError"):
            folder.write(NAME, {"x": object()}, [])
    assert (folder.names(), folder.others()) == ([], [])


def test_a_folder_that_cannot_be_written_can_be_read(local, tmp_path, monkeypatch):
    write(local)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    local.prepare()
    assert is_same(read(local))
    with pytest.raises(CacheError, match="empty is empty and cannot be written by this user"):
        EntryFolder(str(tmp_path / "empty")).prepare()
    with pytest.raises(CacheError, match=f"cannot be created: {tmp_path} is not a folder that this user can write"):
        EntryFolder(str(tmp_path / "a" / "b")).check()


def test_a_place_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    place = EntryFolder(str(tmp_path / "file"))
    for refused, reason in (
        (place.check, "must be an existing or new folder; it is a file"),
        (place.prepare, "cannot be created: File exists"),
        (lambda: write(place), "could not be stored"),
        (lambda: EntryFolder("nosuch://x"), "nosuch://x cannot be used: .*Give a folder or a URL"),
    ):
        with pytest.raises(CacheError, match=reason):
            refused()
    assert place.names() == []
    write(EntryFolder(str(tmp_path)))
    assert EntryFolder(str(path_in(tmp_path))).names() == []
    EntryFolder(str(tmp_path / "new" / "folder")).check()
    assert not (tmp_path / "new").exists()
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingExtraError, match=r"Install rl-core\[zarr\]"):
        EntryFolder(str(tmp_path))


def test_a_url_whose_package_is_missing_is_named(monkeypatch):
    def missing(url, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingExtraError, match="s3://x need a package that is not installed: Install s3fs"):
        EntryFolder("s3://x")


@pytest.mark.parametrize("make", ["link", "loop", "folder", "pipe"])
def test_what_is_in_the_place_of_an_entry_is_broken_and_can_go(local, tmp_path, make):
    outside = tmp_path / "outside"
    outside.mkdir()
    write(EntryFolder(str(outside)))
    here = path_in(tmp_path)
    makers = {
        "link": lambda: here.symlink_to(path_in(outside)),
        "loop": lambda: here.symlink_to(here),
        "folder": lambda: (here / "sub").mkdir(parents=True),
        "pipe": lambda: os.mkfifo(here),
    }
    for action in (local.set_aside, local.remove):
        makers[make]()
        assert local.names() == [NAME]
        with pytest.raises(BrokenEntryError, match="it must be a"), local.open(NAME):
            pass
        assert write(local) is None
        action(NAME)
        assert local.names() == []
    (aside,) = local.broken()
    local.remove(f"broken/{aside}")
    assert local.broken() == {}
    assert is_same(read(EntryFolder(str(outside))))


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_opened_is_no_broken_entry(local, monkeypatch, number):
    """Otherwise a fault of the disk would set a good entry aside."""
    write(local)

    def fail(path, flags):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(array_entries.os, "open", fail)
        with pytest.raises(CacheError, match=f"cannot be read: .*{os.strerror(number)}") as caught, local.open(NAME):
            pass
    assert not isinstance(caught.value, BrokenEntryError)
    assert is_same(read(local))


def test_broken_that_leads_elsewhere_is_refused(local, tmp_path):
    write(local)
    outside = EntryFolder(str(tmp_path / "outside"))
    write(outside)
    (tmp_path / "broken").symlink_to(tmp_path / "outside")
    for refused in (local.broken, lambda: local.set_aside(NAME)):
        with pytest.raises(CacheError, match="broken must be a folder; it is a link"):
            refused()
    (tmp_path / "broken").unlink()
    (tmp_path / "broken").write_text("mine")
    with pytest.raises(CacheError, match="cannot be moved into broken"):
        local.set_aside(NAME)
    assert local.names() == outside.names() == [NAME]


def damage(local, tmp_path, *, seed, times):
    """Damage entries at random, one at a time; return the counts by damage and outcome."""
    draws, seen, arrays = random.Random(seed), Counter(), {"ids": values_of("int32", 700)}
    for compress in (False, True):
        local.write(str(compress), DESCRIPTION, arrays.items(), compress=compress)
    contents = [path_in(tmp_path, str(compress)).read_bytes() for compress in (False, True)]
    for _ in range(times):
        kind, content = damaged(draws, draws.choice(contents))
        path_in(tmp_path).write_bytes(content)
        try:
            found = read(local)
        except BrokenEntryError as error:
            is_named = error.path.startswith(str(path_in(tmp_path))) and error.reason.isprintable()
            seen[kind, "found" if is_named else repr(error)] += 1
        else:
            seen[kind, "harmless" if is_same(found, arrays) else "CHANGED"] += 1
    return seen


def check_damage(seen):
    assert {kind for kind, _ in seen} == {"flip", "cut", "zeros", "copy", "swap", "insert", "append"}
    assert {outcome for _, outcome in seen} == {"found", "harmless"}, seen
    assert seen["flip", "found"] > 5 * seen["flip", "harmless"], seen


def test_1000_damages_are_found_or_harmless(local, tmp_path, seed, small_chunks):
    check_damage(damage(local, tmp_path, seed=seed, times=DAMAGES))


@pytest.mark.soak
def test_array_entries_5000_damages_are_found_or_harmless(local, tmp_path, seed, capsys, small_chunks):
    seen = damage(local, tmp_path, seed=seed, times=LONG_DAMAGES)
    with capsys.disabled():
        sys.stdout.write(f"\n{LONG_DAMAGES} damages, seed {seed}: {dict(seen)}\n")
    check_damage(seen)


@pytest.mark.parametrize("compress", [False, True])
def test_every_changed_bit_of_an_array_is_found(local, tmp_path, compress):
    write(local, compress=compress)
    content = path_in(tmp_path).read_bytes()
    ranges = [place_in(path_in(tmp_path), file) for file in Forgery(path_in(tmp_path)).files]
    places = [place for start, stop in ranges for place in range(start, stop, 101)]
    assert len(places) > len(ranges)
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path_in(tmp_path).write_bytes(changed)
        with pytest.raises(BrokenEntryError, match=re.escape(str(path_in(tmp_path)))):
            read(local)


def test_every_file_is_needed_and_no_other_is_allowed(local, tmp_path):
    write(local)
    whole = Forgery(path_in(tmp_path))
    for file in list(whole.files):
        forgery = Forgery(path_in(tmp_path))
        del forgery.files[file]
        forgery.save(path_in(tmp_path, "less"))
        with pytest.raises(BrokenEntryError, match="it is missing"):
            read(local, "less")
    for file in ("notes.txt", "ids/c/1", "ids/.zarray", "ids/", "ids/c/0/0", "zarr.json/x"):
        forgery = Forgery(path_in(tmp_path))
        forgery.files[file] = b"more"
        forgery.save(path_in(tmp_path, "more"))
        with pytest.raises(BrokenEntryError, match=r"must not exist|arrays of such an entry are"):
            read(local, "more")


def test_an_entry_of_more_than_4_gigabytes_has_larger_fields_in_its_zip(local, tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1_000)
    write(local)
    assert zipfile.stringEndArchive64 in path_in(tmp_path).read_bytes()[-98:]
    assert is_same(read(local))
