"""Groups as flat arrays and back: a round trip changes nothing."""

import json
import math
from dataclasses import replace
from hashlib import sha256

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skip_groups import assert_same_groups, make_groups

from rl_core.data.records import NO_VERSION, ImageSpan, Prompt, Timings, Trajectory
from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files import count_values
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_rollout.skip import EntryKey, EntryStore
from rl_rollout.skip import rows as rows_module
from rl_rollout.skip.rows import Counts, count, decode_groups, decode_images, image_digests, iter_arrays, storable

KEY = EntryKey(step=1)
INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(), max_size=12)  # including lone surrogates
NUMBERS = st.integers(-(2**80), 2**80) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
JSON = st.recursive(SCALARS, lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3))
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
LOGPROBS = st.floats(width=32) | st.sampled_from([-0.0, -math.inf, math.nan])


STORED = {sha256(data).hexdigest(): data for data in (b"one", b"another image")}
IMAGES = st.lists(
    st.builds(ImageSpan, digest=st.sampled_from(sorted(STORED)), start=st.integers(0, 9), length=st.just(4)),
    max_size=2,
).map(tuple)


class Store:
    """Images that no library needs to read."""

    def __init__(self):
        self.kept = []

    def get(self, digest):
        return STORED[digest]

    def put(self, data):
        self.kept.append(data)


def nuclei_of(length):
    return np.arange(length * 5, dtype=np.int32).reshape(length, 5)


def experts_of(length):
    return np.arange(length * 6, dtype=np.int16).reshape(length, 2, 3)


@st.composite
def rows(draw, place, *, reward):
    length = draw(st.integers(0, 6))
    mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    version = draw(st.none() | INT32)  # one version for all tokens, or any for each
    per_token = draw(st.lists(INT32, min_size=length, max_size=length))
    versions = per_token if version is None else [version if each else NO_VERSION for each in mask]
    return Trajectory(
        prompt_uid=place[0],
        session_index=place[1],
        output_index=place[2],
        input_ids=np.array(draw(st.lists(INT32, min_size=length, max_size=length)), dtype=np.int32),
        loss_mask=np.array(mask, dtype=bool),
        rollout_logprobs=np.array(draw(st.lists(LOGPROBS, min_size=length, max_size=length)), dtype=np.float32),
        policy_versions=np.array(versions, dtype=np.int32),
        parent=draw(st.none() | st.integers(0, 3)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        reward=draw(reward),
        reward_components=draw(st.dictionaries(TEXT, st.floats(), max_size=2)),
        timings=Timings(
            generate_s=draw(st.floats(0, 9)), tools_s=draw(st.floats(0, 9)), preemptions=draw(st.integers(0, 9))
        ),
        extras=draw(OBJECTS),
        routed_experts=draw(st.none() | st.just(experts_of(length))),
        nucleus_ids=draw(st.none() | st.just(nuclei_of(length))),
        images=draw(IMAGES),
    )


@st.composite
def sessions(draw, uid, index):
    has_failed = draw(st.booleans())
    reward = st.none() if has_failed else st.none() | st.floats()
    outputs = range(draw(st.integers(0 if has_failed else 1, 3)))
    trajectories = tuple(draw(rows((uid, index, output), reward=reward)) for output in outputs)
    return SessionResult(trajectories=trajectories, failure=draw(st.text(min_size=1)) if has_failed else None)


@st.composite
def group_results(draw):
    prompt = Prompt(
        uid=draw(TEXT),
        input_ids=np.array(draw(st.lists(INT32, max_size=4)), dtype=np.int32),
        messages=tuple(draw(st.lists(OBJECTS, max_size=2))),
        images=draw(IMAGES),
        data_source=draw(TEXT),
        ground_truth=draw(JSON),
        columns=draw(OBJECTS),
    )
    count_of = draw(st.integers(0, 3))
    return GroupResult(
        prompt=prompt,
        sessions=tuple(draw(sessions(prompt.uid, index)) for index in range(count_of)),
        num_audited=draw(st.integers(0, 3)),
        num_audit_failures=draw(st.integers(0, 3)),
    )


def test_baselines_are_stored_and_older_entries_have_none():
    (group,) = make_groups(1)
    with_baselines = [
        SessionResult(trajectories=tuple(replace(row, reward_baseline=0.25) for row in one.trajectories))
        for one in group.sessions
    ]
    arrays = dict(iter_arrays([replace(group, sessions=tuple(with_baselines))]))
    (found,) = decode_groups(arrays, path="entry")
    assert {row.reward_baseline for row in found.trajectories} == {0.25}
    records = arrays["records"].tobytes().replace(b', "reward_baseline": 0.25', b"")
    assert b"baseline" not in records
    (older,) = decode_groups(arrays | {"records": np.frombuffer(records, dtype=np.uint8)}, path="entry")
    assert {row.reward_baseline for row in older.trajectories} == {None}


@settings(max_examples=40)
@given(st.lists(group_results(), max_size=4))
def test_any_groups_come_back_to_the_bit(groups):
    arrays = dict(iter_arrays(groups, images=Store()))
    found = decode_groups(arrays, path="entry")
    assert_same_groups(found, groups)
    assert count(found) == count(groups)
    assert decode_images(arrays, found, path="entry") == [STORED[digest] for digest in image_digests(groups)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("routed_experts", lambda array: array[:-1]),
        ("expert_shapes", lambda array: array[:-1]),
        ("expert_shapes", lambda array: -array),
        ("expert_shapes", lambda array: array * 2**14),
        ("nucleus_ids", lambda array: array[:-1]),
        ("nucleus_widths", lambda array: -array),
    ],
)
def test_indices_that_do_not_fit_are_refused(name, change):
    (group,) = make_groups(1, 1)
    length = len(group.trajectories[0].input_ids)
    row = replace(group.trajectories[0], routed_experts=experts_of(length), nucleus_ids=nuclei_of(length))
    arrays = dict(iter_arrays([replace(group, sessions=(SessionResult(trajectories=(row,)),))]))
    with pytest.raises(BrokenEntryError, match=r"expert|nucleus"):
        decode_groups({**arrays, name: change(arrays[name])}, path="entry")
    with pytest.raises(BrokenEntryError, match="it has the arrays"):
        decode_groups({key: array for key, array in arrays.items() if key != name}, path="entry")


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_experts_of_some_trajectories_come_back_in_their_shape(shape):
    (group,) = make_groups(1, 4)
    given = [None if index % 2 else np.ones((len(row.input_ids), *shape), np.int16) for index, row in numbered(group)]
    rows = [replace(row, routed_experts=given[index]) for index, row in numbered(group)]
    sessions = tuple(SessionResult(trajectories=(row,)) for row in rows)
    (found,) = decode_groups(dict(iter_arrays([replace(group, sessions=sessions)])), path="entry")
    for one, other in zip(given, found.trajectories, strict=True):
        assert (one is None) == (other.routed_experts is None)
        assert one is None or (one.shape, one.tolist()) == (other.routed_experts.shape, other.routed_experts.tolist())


def numbered(group):
    return enumerate(group.trajectories)


def test_an_entry_counts_failed_sessions_and_their_trajectories_too():
    first, second = make_groups(2, 3)
    rows = first.trajectories
    sessions = (
        SessionResult(trajectories=rows[:2]),
        SessionResult(trajectories=(replace(rows[2], reward=None),), failure="broken"),
        SessionResult(failure="gone"),
    )
    groups = [replace(first, sessions=sessions), second]
    num_tokens = sum(len(row.input_ids) for row in (*rows, *second.trajectories))
    assert msgspec.to_builtins(count(groups)) == {
        "groups": 2,
        "sessions": 6,
        "failed_sessions": 2,
        "trajectories": 6,
        "tokens": num_tokens,
    }
    names = ("groups", "sessions", "failed_sessions", "trajectories", "tokens")
    for size in (0, 2**53):
        assert msgspec.to_builtins(msgspec.convert(dict.fromkeys(names, size), Counts)) == dict.fromkeys(names, size)
    for size in (-1, 2**53 + 1):
        with pytest.raises(msgspec.ValidationError, match=r"`int` [<>]= "):
            msgspec.convert({**dict.fromkeys(names, 0), "tokens": size}, Counts)
    assert count([]) == Counts(groups=0, sessions=0, failed_sessions=0, trajectories=0, tokens=0)


def test_records_may_be_as_large_as_the_bounds_and_no_larger(monkeypatch):
    groups = make_groups(2, 2)
    arrays = dict(iter_arrays(groups))
    raw = arrays["records"].tobytes()
    assert (rows_module.MAX_RECORDS_BYTES, rows_module.MAX_RECORDS_VALUES) == (256 * 2**20, 8 * 2**20)
    for name, size in (("MAX_RECORDS_BYTES", len(raw)), ("MAX_RECORDS_VALUES", count_values(raw))):
        with monkeypatch.context() as patched:
            patched.setattr(rows_module, name, size)
            assert dict(iter_arrays(groups))["records"].tobytes() == raw
            assert_same_groups(decode_groups(arrays, path="entry"), groups)
            patched.setattr(rows_module, name, size - 1)
            with pytest.raises(CacheError, match=f"entry may have at most .*{size - 1} "):
                dict(iter_arrays(groups))
            with pytest.raises(BrokenEntryError, match=f"records: it cannot be read .*{size - 1}"):
                decode_groups(arrays, path="entry")


@pytest.mark.soak
@given(st.lists(group_results(), max_size=4))
def test_skip_cache_rows_of_any_groups_come_back_to_the_bit(groups):
    assert_same_groups(decode_groups(dict(iter_arrays(groups, images=Store())), path="entry"), groups)


@pytest.mark.parametrize("compress", [False, True])
def test_any_groups_come_back_from_the_disk(tmp_path, compress):
    images = Store()
    store = EntryStore(str(tmp_path), compress=compress, images=images)

    @settings(max_examples=8)
    @given(st.lists(group_results(), max_size=4))
    def check(groups):
        store.write(KEY, groups, fingerprint={}, generate_s=1.0, replace=True)
        images.kept.clear()
        assert_same_groups(store.read(KEY).groups, groups)
        assert images.kept == [STORED[digest] for digest in image_digests(groups)]

    check()


def test_images_that_are_not_those_of_the_groups_are_refused(tmp_path):
    (group,) = make_groups(1, 1)
    digests = sorted(STORED)
    group = replace(
        group, prompt=replace(group.prompt, images=tuple(ImageSpan(digest=one, start=0, length=1) for one in digests))
    )
    arrays = dict(iter_arrays([group], images=Store()))
    whole = arrays["images"]
    wrong = [
        {**arrays, "images": np.concatenate([whole[:-1], whole[-1:] + 1])},
        {**arrays, "image_offsets": arrays["image_offsets"][[0, 2]]},
        {name: array for name, array in arrays.items() if not name.startswith("image")},
    ]
    assert decode_images(arrays, [group], path="entry") == [STORED[one] for one in digests]
    for changed in wrong:
        with pytest.raises(BrokenEntryError, match="entry/images: it must have the images"):
            decode_images(changed, [group], path="entry")
    with pytest.raises(BrokenEntryError, match="it has the arrays"):
        decode_groups({name: array for name, array in arrays.items() if name != "images"}, path="entry")
    with pytest.raises(CacheError, match="groups with images need the store that has them"):
        EntryStore(str(tmp_path)).write(KEY, [group], fingerprint={}, generate_s=1.0)


def test_what_would_not_come_back_is_refused_as_it_is_stored(tmp_path):
    (group,) = make_groups(1, 1)
    (row,) = group.trajectories

    def with_row(**changes):
        return replace(group, sessions=(SessionResult(trajectories=(replace(row, **changes),)),))

    def with_prompt(**changes):
        return replace(group, prompt=replace(group.prompt, **changes))

    cases = [
        (with_row(session_index=1), r"must be \('p0', 0, 0\); found \('p0', 1, 0\)"),
        (
            with_row(output_index=1),
            "output_index of a trajectory must be .*Fix the prompt's row or the agent",
        ),
        (with_row(prompt_uid="other"), "found .'other'"),
        (
            with_row(extras={"a": object()}),
            "rollouts of prompt 'p0' cannot be stored: a value of type object is",
        ),
        (with_prompt(ground_truth={1, 2}), "rollouts of prompt 'p0' cannot be stored: a value of type set is"),
        (with_prompt(columns={"image": b"png"}), "rollouts of prompt 'p0' cannot be stored: a value of type bytes is"),
    ]
    for broken, message in cases:
        with pytest.raises(CacheError, match=message):
            EntryStore(str(tmp_path)).write(KEY, [broken], fingerprint={}, generate_s=1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_session_with_trajectories_that_cannot_be_stored_keeps_its_failure_alone(tmp_path):
    (group,) = make_groups(1, 2)
    (first, second) = group.trajectories
    reward_less = replace(second, reward=None)
    odd = [
        {"session_index": 7},
        {"extras": {"a": object()}},
    ]
    for changes in odd:
        failed = SessionResult(trajectories=(replace(reward_less, **changes),), failure="loop gave nonsense")
        step = replace(group, sessions=(SessionResult(trajectories=(first,)), failed))
        store = EntryStore(str(tmp_path))
        store.write(KEY, [step], fingerprint={}, generate_s=1.0, replace=True)
        expected = replace(step, sessions=(step.sessions[0], SessionResult(failure="loop gave nonsense")))
        assert_same_groups(store.read(KEY).groups, [expected])
    good = SessionResult(trajectories=(reward_less,), failure="audit: logprobs differ")
    step = replace(group, sessions=(SessionResult(trajectories=(first,)), good))
    assert_same_groups(storable([step]), [step])


def with_records(arrays, change):
    records = json.loads(arrays["records"].tobytes())
    change(records)
    return {**arrays, "records": np.frombuffer(json.dumps(records).encode(), dtype=np.uint8)}


def test_arrays_that_do_not_belong_together_are_refused():
    arrays = dict(iter_arrays(make_groups(2, 2)))
    ends = arrays["offsets"].tolist()

    def offsets(*values):
        return {**arrays, "offsets": np.array(values, dtype=np.int64)}

    def first_row(records):
        return records[0]["sessions"][0]["trajectories"][0]

    cases = [
        (offsets(0, ends[2], ends[1], ends[3], ends[4]), "offsets must rise"),
        (offsets(*ends[:4], ends[4] + 1), "offsets must rise"),
        (offsets(*ends[:4], ends[4] - 1), "offsets must rise"),
        (offsets(-1, *ends[1:]), "offsets must rise"),
        (offsets(2**62, *ends[1:]), "offsets must rise"),
        (offsets(), "offsets must rise"),
        (offsets(*ends[:3], ends[4]), "records: it cannot be read"),
        ({**arrays, "loss_mask": arrays["loss_mask"][1:]}, "loss_mask"),
        ({**arrays, "loss_mask": np.full(ends[4], 2, dtype=np.uint8).view(np.bool_)}, "must be 0 or 1"),
        ({**arrays, "rollout_logprobs": arrays["rollout_logprobs"][1:]}, "rollout_logprobs"),
        ({**arrays, "policy_versions": arrays["policy_versions"][1:]}, "policy_versions"),
        ({**arrays, "prompt_offsets": arrays["prompt_offsets"][:-1]}, "prompt_offsets: offsets must rise"),
        ({**arrays, "surprise": arrays["input_ids"]}, "it has the arrays"),
        ({name: value for name, value in arrays.items() if name != "policy_versions"}, "it has the arrays"),
        (with_records(arrays, lambda records: records.pop()), "it has 2 trajectories of 1 prompts; expected 4 of 2"),
        (with_records(arrays, lambda records: records[0]["sessions"].pop()), "it has 3 trajectories of 2 prompts"),
        (with_records(arrays, lambda records: first_row(records).update(finish_reason="tired")), "finish_reason"),
        (with_records(arrays, lambda records: first_row(records).update(reward="1")), "cannot be read"),
        (with_records(arrays, lambda records: first_row(records).update(reward=10**400)), "cannot be read"),
        (with_records(arrays, lambda records: first_row(records)["timings"].update(tools_s=10**400)), "cannot be read"),
        (with_records(arrays, lambda records: first_row(records).update(extras=3)), "cannot be read"),
        (with_records(arrays, lambda records: records[0]["prompt"].pop("uid")), "cannot be read"),
    ]
    for number, (changed, message) in enumerate(cases):
        with pytest.raises(BrokenEntryError, match=message):
            pytest.fail(f"case {number} gave {decode_groups(changed, path='entry')}")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[",
        b"{}",
        b"[1]",
        b"\xff\xfe[]",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" + b"9" * 5000 + b"]",
        b'[{"uid": "a", "uid": "a"}]',
        b"[NaN]",
        b"null",
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_records_that_are_none_are_refused(raw):
    arrays = dict(iter_arrays(make_groups(1, 1)))
    with pytest.raises(BrokenEntryError, match="records: it cannot be read"):
        decode_groups({**arrays, "records": np.frombuffer(raw, dtype=np.uint8)}, path="entry")
