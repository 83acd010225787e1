"""Manifests as files, and names of entries."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_rollout.skip.manifest import ArraySpec, Counts, FileSpec, Manifest, decode_manifest, encode_manifest

from rl_core.errors import BrokenEntryError
from rl_core.files.plain_files import count_values, load_json, preview, preview_path
from rl_rollout.skip import EntryKey

MANIFEST = Manifest(
    format="rl-rollout skip cache entry",
    format_version=1,
    key=EntryKey(step=7, part=1),
    created_at=1.5,
    generate_s=0.25,
    counts=Counts(groups=1, sessions=2, failed_sessions=0, trajectories=2, tokens=30),
    fingerprint={"seed": 1, "sampling": {"temperature": 1.0}, "tools": None},
    arrays_folder="arrays-0123456789abcdef",
    arrays={
        "input_ids": ArraySpec(
            dtype="int32",
            shape=(30,),
            chunk_length=16,
            is_compressed=False,
            metadata=FileSpec(400, 1),
            chunks=(FileSpec(68, 2), FileSpec(68, 3)),
        )
    },
)


def test_a_manifest_comes_back_and_lists_its_files():
    assert decode_manifest(encode_manifest(MANIFEST), path="m") == MANIFEST
    assert MANIFEST.size_bytes == 400 + 68 + 68
    assert list(MANIFEST.files()) == [
        "arrays-0123456789abcdef/input_ids/zarr.json",
        "arrays-0123456789abcdef/input_ids/c/0",
        "arrays-0123456789abcdef/input_ids/c/1",
    ]
    assert MANIFEST.arrays["input_ids"].num_chunks == 2


def test_any_value_that_is_changed_is_found():
    document = json.loads(encode_manifest(MANIFEST))

    def places(value, path=()):
        if isinstance(value, dict | list):
            for key in value if isinstance(value, dict) else range(len(value)):
                yield from places(value[key], (*path, key))
        else:
            yield path

    found = list(places(document["manifest"]))
    assert len(found) > 20
    for path in found:
        changed = json.loads(encode_manifest(MANIFEST))
        parent = changed["manifest"]
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = "other"
        with pytest.raises(BrokenEntryError, match="its checksum does not match its content"):
            decode_manifest(json.dumps(changed).encode(), path="m")


def test_another_layout_of_the_same_json_is_the_same_manifest():
    document = json.loads(encode_manifest(MANIFEST))
    turned = {"manifest": dict(reversed(document["manifest"].items())), "sha256": document["sha256"]}
    assert decode_manifest(json.dumps(turned).encode(), path="m") == MANIFEST


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train-00000007-0001", EntryKey(step=7, part=1)),
        ("validation-00000000-0000", EntryKey(kind="validation", step=0)),
        ("train-123456789012-12345", EntryKey(step=123456789012, part=12345)),
    ],
)
def test_names_of_entries_say_their_keys(name, key):
    assert (EntryKey.parse(name), key.name) == (key, name)


@pytest.mark.parametrize(
    "name",
    [
        "train-7-0",
        "train-00000007",
        "train-00000007-00001",  # one digit too many in the last part
        "Train-00000007-0000",
        "-00000007-0000",
        "train-00000007-0000\n",
        "train-00000007-0000.tmp",
        ".writing-train-00000007-0000-0123456789abcdef",
        "broken",
        "../train-00000007-0000",
        "train-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667-0000",
        f"{'a' * 40}-00000007-0000",
    ],
)
def test_other_names_are_no_entries(name):
    assert EntryKey.parse(name) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
)


def number_of_values(value):
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(number_of_values, below))


@given(JSON)
def test_no_document_has_more_values_than_are_counted(value):
    raw = json.dumps(value).encode()
    assert count_values(raw) >= number_of_values(value)
    assert load_json(raw, max_values=count_values(raw)) == value
    with pytest.raises(ValueError, match="it may have"):
        load_json(raw, max_values=count_values(raw) - 1)


def test_what_is_shown_is_short_and_can_be_printed():
    assert preview("a\x1b[2J\udcff") == r"'a\x1b[2J\udcff'"
    assert len(preview("x" * 10**6)) == 80
    assert preview_path("a/b") == "a/b"
    assert preview_path("a\n\udcff").isprintable()
