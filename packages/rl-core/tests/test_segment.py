"""Segments: columns are read as views, and errors name the altered part."""

import json
import math
import random
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core import Batch, Ragged, RowKey
from rl_core.data.columns import COLUMNS, ColumnSpec, declare_column
from rl_core.data.ragged import offsets_of
from rl_core.data.segment import HEADER, Schema, decode_segment, plan_segment, segment_size
from rl_core.errors import DataError, SegmentError
from rl_core.files.durable import checksum

FAST = settings(max_examples=60, deadline=None)
OWN = {
    "segment_top": ColumnSpec(dtype="float32", is_ragged=True, meaning="Several values a token."),
    "segment_matrix": ColumnSpec(dtype="int64", is_ragged=False, meaning="A matrix a row."),
}


@pytest.fixture(autouse=True, scope="module")
def _own_columns():
    for name, spec in OWN.items():
        declare_column(name, spec)
    yield
    for name in OWN:
        del COLUMNS[name]


@st.composite
def batches(draw):
    """Draw batches with any columns: concatenated, selected, empty, or with empty rows."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=7))
    batch = batch_of(lengths, names=draw(st.sets(st.sampled_from(sorted(columns_of([1]))), max_size=6)))
    if draw(st.booleans()):
        more = batch_of(draw(st.lists(st.integers(0, 5), max_size=4)), names=batch.names, first=len(batch))
        batch = Batch.concat([batch, more])
    if draw(st.booleans()) and len(batch):
        rows = draw(st.permutations(range(len(batch))))
        batch = batch.select(rows[: draw(st.integers(0, len(batch)))])
    return batch


def encode_segment(batch):
    return plan_segment(batch).as_bytes()


def columns_of(lengths, *, first=0):
    """Return columns whose values depend on their row and position."""
    offsets, total = offsets_of(lengths), sum(lengths)
    tokens = np.arange(1000 * first, 1000 * first + total)
    rows = np.arange(first, first + len(lengths))
    return {
        "input_ids": Ragged(tokens.astype(np.int32), offsets),
        "loss_mask": Ragged(tokens % 2 == 0, offsets),
        "rollout_logprobs": Ragged(-tokens.astype(np.float32), offsets),
        "segment_top": Ragged((tokens[:, None] + np.arange(3) / 4).astype(np.float32), offsets),
        "reward": rows.astype(np.float32),
        "is_truncated": rows % 2 == 1,
        "segment_matrix": rows[:, None, None] + np.arange(4).reshape(2, 2),
    }


def batch_of(lengths, *, names=None, first=0, extras=True):
    columns = columns_of(lengths, first=first)
    keys = [RowKey(f"p{(first + i) // 2}", (first + i) % 2, 0) for i in range(len(lengths))]
    kept = {name: column for name, column in columns.items() if names is None or name in names}
    more = [{"row": first + i, "text": "é" * i} if i % 2 else {} for i in range(len(lengths))] if extras else None
    return Batch(keys, kept, extras=more)


def rows_of(batch):
    columns = {name: [row.tolist() for row in batch[name]] for name in sorted(batch.names)}
    return tuple(batch.keys), list(batch.extras), columns


def resigned(segment, *, schema=None, edit=None, is_signed=True):
    """Return a segment with another schema and new checksums; arrays move if the schema grows."""
    magic, version, num_arrays, schema_bytes, size, _ = HEADER.unpack_from(segment)
    start = HEADER.size + schema_bytes + 4 * num_arrays
    content = bytes(segment)
    if schema is None:
        found = json.loads(schema_of(segment))
        edit(found)
        shift = max(-(-(len(json.dumps(found)) + 24 * len(found["arrays"]) - schema_bytes) // 64), 0) * 64
        content = content[:start] + bytes(shift) + content[start:]
        for entry in found["arrays"]:
            if isinstance(entry["place"], int) and start <= entry["place"] < size:
                entry["place"] += shift
        size += shift
        sums = [crc_of(content, entry) for entry in found["arrays"]]
        schema, num_arrays = json.dumps(found).encode(), len(sums)
    else:
        sums = [0] * num_arrays
        size = max(size, HEADER.size + len(schema) + 4 * num_arrays)
    described = schema + struct.pack(f"<{num_arrays}I", *sums)
    header = HEADER.pack(magic, version, num_arrays, len(schema), size, checksum(described) if is_signed else 0)
    return header + described + content[HEADER.size + len(described) :]


def crc_of(content, entry):
    """Return the checksum of an array as a writer computes it; 0 if the entry describes no array."""
    try:
        size = math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
        return checksum(content[entry["place"] : entry["place"] + size])
    except (TypeError, ValueError):
        return 0


def edited(change, *, lengths=(2, 0, 3), names=None):
    """Return a segment whose schema is edited by `change`."""
    return resigned(encode_segment(batch_of(list(lengths), names=names)), edit=change)


def array(schema, name):
    return next(entry for entry in schema["arrays"] if entry["name"] == name)


def refused(segment, *words):
    """Check that decoding raises a SegmentError with these words and uses little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(SegmentError) as caught:
            decode_segment(segment)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(segment) + (1 << 20)
    finally:
        tracemalloc.stop()
    for word in words:
        assert word in str(caught.value)


# -- round trips


@FAST
@given(batches())
def test_a_batch_comes_out_as_it_went_in(batch):
    segment = encode_segment(batch)
    assert rows_of(decode_segment(segment)) == rows_of(batch)
    assert rows_of(decode_segment(segment, is_verified=True)) == rows_of(batch)
    for name in batch.names:
        assert decode_segment(segment)[name].dtype == batch[name].dtype


@FAST
@given(batches(), st.integers(0, 200))
def test_a_segment_is_written_into_memory_as_it_is_made_alone(batch, spare):
    plan = plan_segment(batch)
    memory = bytearray(b"\xff" * (plan.size_bytes + spare))
    plan.write(memory)
    alone = plan.as_bytes()
    assert segment_size(alone) == segment_size(memory) == plan.size_bytes == len(alone)
    assert rows_of(decode_segment(memory)) == rows_of(decode_segment(alone)) == rows_of(batch)
    assert plan.size_bytes % 64 == 0


def test_rows_of_one_prompt_and_of_none_are_decoded():
    assert rows_of(decode_segment(encode_segment(Batch((), {})))) == ((), [], {})
    one = batch_of([4])
    assert rows_of(decode_segment(encode_segment(one))) == rows_of(one)
    unused = Batch.concat([batch_of([1, 2]), batch_of([3, 4], first=2)]).select([3])
    assert msgspec.json.decode(schema_of(encode_segment(unused)))["uids"] == ["p1"]


def schema_of(segment):
    return segment[HEADER.size : HEADER.size + HEADER.unpack_from(segment)[3]]


def test_large_columns_are_written_in_pieces():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 30, 300_001).astype(np.int32)
    batch = Batch(
        [RowKey("p0", i, 0) for i in range(3)],
        {"input_ids": Ragged(values, np.asarray([0, 100_000, 100_000, 300_001]))},
    ).select([2, 0])
    plan = plan_segment(batch)
    memory = bytearray(plan.size_bytes)
    plan.write(memory)
    found = decode_segment(memory).ragged("input_ids")
    assert np.array_equal(found[0], values[100_000:])
    assert np.array_equal(found[1], values[:100_000])


def test_columns_are_views_of_the_segment_and_read_only():
    memory = np.frombuffer(encode_segment(batch_of([2, 0, 3])), dtype=np.uint8).copy()
    batch = decode_segment(memory)
    for name in batch.names:
        column = batch[name]
        values = column.values if isinstance(column, Ragged) else column
        assert np.shares_memory(values, memory), name
        assert not values.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0
    assert all(np.shares_memory(keys, memory) for keys in (batch.keys.sessions, batch.keys.outputs))


def test_arrays_are_aligned():
    schema = msgspec.json.decode(schema_of(encode_segment(batch_of([1, 2, 3]))), type=Schema)
    assert [entry.place % 64 for entry in schema.arrays] == [0] * len(schema.arrays)
    assert len({entry.place for entry in schema.arrays}) == len(schema.arrays)


def test_extras_must_be_json():
    batch = Batch([RowKey("p0", 0, 0), RowKey("p0", 1, 0)], {}, extras=[{}, {"a": object()}])
    with pytest.raises(DataError, match=r"extras of row \('p0', 1, 0\) must be JSON"):
        encode_segment(batch)


def test_arrays_that_travel_are_little_endian_numbers_of_few_dimensions():
    deep = Batch([RowKey("p0", 0, 0)], {"segment_matrix": np.zeros((1,) * 9, dtype=np.int64)})
    with pytest.raises(DataError, match=r"'segment_matrix' must contain .* at most 8 dimensions; found int64 in 9"):
        encode_segment(deep)
    swapped = Batch([RowKey("p0", 0, 0)], {"segment_matrix": np.zeros(1, dtype=np.int64)})
    swapped._columns["segment_matrix"] = np.zeros(1, dtype=">i8")
    with pytest.raises(DataError, match="'segment_matrix' must contain little-endian numbers"):
        encode_segment(swapped)


# -- accidental damage

SMALL = [1, 2]


def test_every_flipped_byte_is_found_or_lies_in_padding():
    segment = encode_segment(batch_of(SMALL))
    whole = rows_of(decode_segment(segment))
    schema = msgspec.json.decode(schema_of(segment), type=Schema)
    covered = set()
    for entry in schema.arrays:
        size = int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize
        covered |= set(range(entry.place, entry.place + size))
    covered |= set(range(struct.calcsize("<8sIIQQI")))
    covered |= set(range(HEADER.size, HEADER.size + len(schema_of(segment)) + 4 * len(schema.arrays)))
    names = {entry.name for entry in schema.arrays}
    assert len(segment) > HEADER.size
    for place in range(len(segment)):
        for flip in (0x01, 0x80, 0xFF):
            altered = bytearray(segment)
            altered[place] ^= flip
            if place not in covered:
                assert rows_of(decode_segment(bytes(altered))) == whole, place
                continue
            with pytest.raises(SegmentError) as caught:
                decode_segment(bytes(altered))
            if place >= HEADER.size + len(schema_of(segment)) + 4 * len(schema.arrays):
                assert any(f"column {name!r} of 2 rows of prompts 'p0' to 'p0'" in str(caught.value) for name in names)


def test_every_truncation_is_found():
    segment = encode_segment(batch_of(SMALL))
    assert len(segment) > HEADER.size
    for length in range(len(segment)):
        for cut in (segment[:length], segment[:length] + bytes(len(segment) - length)):
            if len(cut) == len(segment) and decodes_like(cut, segment):
                continue  # the cut removed only padding or zeros
            with pytest.raises(SegmentError, match="segment"):
                decode_segment(cut)
        with pytest.raises(SegmentError, match="segment"):
            segment_size(segment[:length])


def decodes_like(altered, segment):
    try:
        return rows_of(decode_segment(altered)) == rows_of(decode_segment(segment))
    except SegmentError:
        return False


# -- deliberate changes

BIG = 1 << 60


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("input_ids", {"shape": [BIG]}, []),
        ("input_ids", {"shape": [BIG, BIG, BIG]}, []),
        ("input_ids", {"shape": [10**30]}, []),
        ("input_ids", {"shape": [0, BIG, BIG]}, []),
        ("input_ids", {"shape": [0, 1 << 62]}, []),
        ("input_ids", {"shape": [0, 1 << 70]}, []),
        ("input_ids", {"shape": [-5]}, []),
        ("input_ids", {"shape": [-1, -5]}, []),
        ("input_ids", {"shape": []}, []),
        ("input_ids", {"shape": [1] * 9}, []),
        ("input_ids", {"shape": [1] * 10_000}, []),
        ("input_ids", {"shape": [4]}, ["offsets must run"]),
        ("input_ids", {"shape": [5.0]}, []),
        ("input_ids", {"shape": "5"}, ["cannot be read"]),
        ("input_ids", {"place": -64}, []),
        ("input_ids", {"place": BIG}, []),
        ("input_ids", {"place": 1 << 80}, []),
        ("input_ids", {"dtype": "object"}, []),
        ("input_ids", {"dtype": "O"}, []),
        ("input_ids", {"dtype": "U100"}, []),
        ("input_ids", {"dtype": "datetime64[s]"}, []),
        ("input_ids", {"dtype": "complex128"}, []),
        ("input_ids", {"dtype": "[('a', 'O')]"}, []),
        ("input_ids", {"dtype": None}, ["cannot be read"]),
        ("input_ids", {"dtype": "uint32"}, ["'input_ids'", "dtype int32; found uint32"]),
        ("input_ids", {"name": "reward"}, ["input_ids"]),
        ("input_ids", {"name": "nothing"}, ["input_ids"]),
        ("input_ids", {"name": "#prompt"}, []),
        ("input_ids", {"name": "../../etc"}, ["input_ids"]),
        ("reward", {"name": "nothing"}, ["unknown column 'nothing'"]),
        ("reward", {"name": "#more"}, ["unknown column '#more'"]),
        ("reward", {"shape": [1, 3]}, ["'reward' must have 3 rows; found 1"]),
        ("reward", {"dtype": "int32"}, ["'reward' must have dtype float32; found int32"]),
        ("#prompt", {"name": "#promt"}, ["#prompt"]),
        ("#prompt", {"dtype": "float32"}, ["keys must be [3] int32"]),
        ("#session", {"shape": [3, 1]}, ["keys must be [3] int32"]),
        ("#offsets", {"dtype": "uint64"}, ["offsets must be [4] int64"]),
        ("#offsets", {"dtype": "float64"}, ["offsets must be [4] int64"]),
        ("#offsets", {"shape": [2, 2]}, ["offsets must be [4] int64"]),
        ("#offsets", {"name": "#ofsets"}, ["lack values or offsets"]),
        ("#offsets", {"extra": 1}, ["cannot be read"]),
    ],
)
def test_an_array_that_cannot_be_is_refused(name, change, words):
    refused(edited(lambda schema: array(schema, name).update(change)), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_rows": 2}, ["keys must be [2] int32"]),
        ({"num_rows": 4}, ["keys must be [4] int32"]),
        ({"num_rows": -1}, ["keys must be [-1] int32"]),
        ({"num_rows": BIG}, ["keys must be"]),
        ({"num_rows": 10**30}, []),
        ({"num_rows": None}, ["cannot be read"]),
        ({"uids": []}, ["refers to prompt 1 of 0"]),
        ({"uids": ["p0"]}, ["refers to prompt 1 of 1"]),
        ({"uids": ["p0", "p0"]}, ["appears twice"]),
        ({"uids": [1, 2]}, ["cannot be read"]),
        ({"ragged": []}, ["must be ragged"]),
        ({"ragged": ["input_ids", "input_ids"]}, ["input_ids"]),
        ({"ragged": ["input_ids", "loss_mask", "nothing"]}, ["nothing"]),
        ({"ragged": ["input_ids", "reward"]}, ["offsets must run"]),
        ({"ragged": ["#prompt"]}, ["#prompt"]),
        ({"more": 1}, ["cannot be read"]),
        ({"arrays": []}, []),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(change, words):
    names = {"input_ids", "loss_mask", "reward"}
    refused(edited(lambda schema: schema.update(change), names=names), *words)


def test_a_prompt_named_twice_is_refused_without_rows_too():
    refused(edited(lambda schema: schema.update(uids=["p0", "p0"]), lengths=()))


def test_the_number_of_arrays_must_be_that_of_the_header():
    segment = bytearray(encode_segment(batch_of(SMALL)))
    values = list(HEADER.unpack_from(segment))
    for num_arrays in (0, values[2] - 1, values[2] + 1, (1 << 32) - 1):
        described = bytes(segment[HEADER.size : HEADER.size + values[3] + 4 * num_arrays])
        altered = HEADER.pack(*values[:2], num_arrays, *values[3:5], checksum(described)) + segment[HEADER.size :]
        refused(altered)
    for size in (0, HEADER.size, len(segment) + 1, 1 << 63, (1 << 64) - 1):
        refused(HEADER.pack(*values[:4], size, values[5]) + segment[HEADER.size :])
    for schema_bytes in (0, values[3] - 1, values[3] + 1, 1 << 40, (1 << 64) - 1):
        refused(HEADER.pack(*values[:3], schema_bytes, *values[4:]) + segment[HEADER.size :])


@pytest.mark.parametrize("magic", [(b"RLSEGMT\1", 1), (b"RLSEGMT\0", 2), (b"\x80\x04\x95\0\0\0\0\0", 1)])
def test_other_formats_are_refused(magic):
    segment = encode_segment(batch_of(SMALL))
    refused(HEADER.pack(*magic, *HEADER.unpack_from(segment)[2:]) + segment[HEADER.size :], "format")


def with_array(segment, name, values):
    """Return a segment in which an array is replaced by one of the same size, with new checksums."""
    *_, schema_bytes, _, _ = HEADER.unpack_from(segment)
    schema = msgspec.json.decode(schema_of(segment), type=Schema)
    index = next(i for i, entry in enumerate(schema.arrays) if entry.name == name)
    content = values if isinstance(values, bytes) else np.asarray(values).tobytes()
    altered = bytearray(segment)
    altered[schema.arrays[index].place : schema.arrays[index].place + len(content)] = content
    table = HEADER.size + schema_bytes + 4 * index
    altered[table : table + 4] = struct.pack("<I", checksum(content))
    described = bytes(altered[HEADER.size : HEADER.size + schema_bytes + 4 * len(schema.arrays)])
    altered[: HEADER.size] = HEADER.pack(*HEADER.unpack_from(segment)[:5], checksum(described))
    return bytes(altered)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("#prompt", np.asarray([0, 0, 2], np.int32), ["refers to prompt 2 of 2"]),
        ("#prompt", np.asarray([0, -1, 1], np.int32), ["negative index"]),
        ("#prompt", np.asarray([0, 0, 2**31 - 1], np.int32), ["refers to prompt"]),
        ("#session", np.asarray([0, -1, 0], np.int32), ["negative index"]),
        ("#output", np.asarray([-(2**31), 0, 0], np.int32), ["negative index"]),
        ("#session", np.asarray([0, 0, 0], np.int32), ["('p0', 0, 0)", "twice"]),
        ("#offsets", np.asarray([0, 4, 2, 5], np.int64), ["offsets must not decrease"]),
        ("#offsets", np.asarray([1, 2, 2, 5], np.int64), ["offsets must run from 0"]),
        ("#offsets", np.asarray([0, 2, 2, 6], np.int64), ["offsets must run from 0"]),
        ("#offsets", np.asarray([0, -(2**63), 2**62, 5], np.int64), ["offsets must not decrease"]),
        ("#offsets", np.asarray([0, 2**63 - 1, 2, 5], np.int64), ["offsets must not decrease"]),
    ],
)
def test_keys_and_offsets_out_of_range_are_refused(name, values, words):
    refused(with_array(encode_segment(batch_of([2, 0, 3])), name, values), *words)


@pytest.mark.parametrize(
    "text",
    [b"[" * 40_000, b'[{"a":' * 15_000, b"[[],[],[]]", b'[{},{},{},{"a":1}]', b"[{},{}]", b"{}", b"null", b"\xff\xfe"],
)
def test_extras_that_are_not_json_of_rows_are_refused(text):
    rows = [{"text": "x" * 100_000}, {}, {}]
    batch = Batch([RowKey("p0", i, 0) for i in range(3)], {}, extras=rows)
    size = len(msgspec.json.encode(rows))
    refused(with_array(encode_segment(batch), "#extras", text + b" " * (size - len(text))))


@pytest.mark.parametrize(
    "schema",
    [
        b"[" * 100_000,
        b'{"num_rows":' + b"[" * 100_000,
        b'{"num_rows":0,"uids":[],"ragged":[],"arrays":[{"name":"a","dtype":"b","place":0,"shape":' + b"[" * 50_000,
        b'{"num_rows":' + b"9" * 100_000 + b"}",
        b"\x80\x04\x95",
        b"",
    ],
)
def test_hostile_json_is_refused(schema):
    refused(resigned(encode_segment(batch_of(SMALL)), schema=schema), "schema")


def test_resigning_changes_nothing_by_itself():
    segment = encode_segment(batch_of([2, 0, 3]))
    assert rows_of(decode_segment(resigned(segment, edit=lambda schema: None))) == rows_of(decode_segment(segment))
    refused(resigned(segment, edit=lambda schema: None, is_signed=False), "checksum")
    offsets = np.asarray([0, 2, 2, 5], np.int64)
    assert rows_of(decode_segment(with_array(segment, "#offsets", offsets))) == rows_of(decode_segment(segment))


# -- fuzzing


def mutate(rng, segment):
    """Return a segment with a random change of its bytes, or of its schema with new checksums."""
    kind = rng.randrange(4)
    if kind == 0:
        altered = bytearray(segment)
        for _ in range(rng.randint(1, 8)):
            altered[rng.randrange(len(altered))] = rng.randrange(256)
        return bytes(altered)
    if kind == 1:
        start, end = sorted((rng.randrange(len(segment)), rng.randrange(len(segment) + 1)))
        return segment[:start] + segment[end:]
    if kind == 2:
        schema = bytearray(schema_of(segment))
        for _ in range(rng.randint(1, 3)):
            schema[rng.randrange(len(schema))] = rng.choice(b'0123456789-"[]{},:eE. abc')
        return resigned(segment, schema=bytes(schema))

    def change(schema):
        target = rng.choice([schema, *schema["arrays"]])
        values = [-1, 0, 1, 2, 3, 64, 128, BIG, [], [0], [1, 2], [0, BIG], "int32", "int64", "reward", "#prompt", None]
        target[rng.choice(sorted(target))] = rng.choice(values)

    try:
        return resigned(segment, edit=change)
    except (TypeError, KeyError):  # new checksums need a valid list of arrays
        return segment[:-1]


def fuzz(seed, rounds):
    rng = random.Random(seed)
    for number in range(rounds):
        lengths = [rng.randrange(6) for _ in range(rng.randrange(5))]
        batch = batch_of(lengths, extras=rng.random() < 0.5)
        segment = encode_segment(batch)
        altered = mutate(rng, segment)
        try:
            found = decode_segment(altered)
            rows_of(found)
        except SegmentError:
            continue
        except BaseException as error:
            raise AssertionError(f"seed {seed}, round {number}: {type(error).__name__} {error}") from error
        assert len(found) <= len(altered), f"seed {seed}, round {number}"


def test_altered_segments_of_the_transfer_queue_are_refused_or_read(seed):
    fuzz(seed, 400)


@pytest.mark.soak
def test_altered_segments_of_the_transfer_queue_are_refused_or_read_for_long(seed):
    fuzz(seed, 200_000)
