"""Torn or forged entries: their trajectories are scored again, without other effects."""

import os
import random

import numpy as np
import pytest
import structlog
from entry_forgery import Forgery, damaged, flip

from rl_core.data.row_keys import RowKey
from rl_core.files import entry_zip
from rl_distill.teacher import score_cache
from rl_distill.teacher.score_cache import ScoreCache, ScoreKind
from rl_distill.teacher.scores import TeacherRow, TeacherScores

KIND = ScoreKind(teacher="abc", dtype="float32", top_k=2)


def make_rows():
    rng = np.random.default_rng(0)
    mask = np.arange(12) >= 4
    ids = [rng.integers(0, 90, 12).astype(np.int32) for _ in range(6)]
    return [TeacherRow(key=RowKey(f"p{n}", 0, 0), input_ids=own, loss_mask=mask) for n, own in enumerate(ids)]


def make_scores(row):
    rng = np.random.default_rng(int(row.input_ids[0]))
    ids = np.where(row.loss_mask[:, None], rng.integers(0, 90, (12, 3)), -1).astype(np.int32)
    ids[:, 0] = np.where(row.loss_mask, row.input_ids, -1)
    logprobs = np.where(row.loss_mask[:, None], -rng.random((12, 3)), 0).astype(np.float32)
    return TeacherScores(logprobs=logprobs, token_ids=ids)


ROWS = make_rows()


@pytest.fixture
def entry(tmp_path, monkeypatch):
    monkeypatch.setattr(entry_zip, "MAX_CHUNK_BYTES", 256)
    cache = ScoreCache(tmp_path, KIND)
    cache.store(ROWS, [make_scores(row) for row in ROWS])
    cache.flush()
    (found,) = cache.folder.glob("scores-*")
    return found


def look(tmp_path):
    """Return the entries that a new process finds, its events, and its cache."""
    with structlog.testing.capture_logs() as events:
        cache = ScoreCache(tmp_path, KIND)
        found = cache.lookup(ROWS)
    for one, row in zip(found, ROWS, strict=True):
        if one is not None:
            assert np.array_equal(one.logprobs, make_scores(row).logprobs)
            assert np.array_equal(one.token_ids, make_scores(row).token_ids)
    return [one is not None for one in found], [event["event"] for event in events], cache


def forge(entry, change):
    """Change an entry, with valid checksums."""
    forgery = Forgery(entry)
    change(forgery)
    forgery.save()


def test_a_whole_entry_is_found(entry, tmp_path):
    assert look(tmp_path)[:2] == ([True] * 6, [])


def test_damage_never_gives_other_scores(entry, tmp_path, seed):
    draws, content, seen = random.Random(seed), entry.read_bytes(), set()
    for _ in range(100):
        entry.write_bytes(damaged(draws, content)[1])
        found, events, cache = look(tmp_path)
        seen.add((any(found), *events))
        for aside in (cache.folder / "broken").glob("*"):
            assert not entry.exists()
            aside.unlink()
    assert seen == {(True,), (False, "teacher_scores_set_aside")}


def test_what_was_set_aside_is_scored_and_stored_anew(entry, tmp_path):
    flip(entry, "logprobs/c/0")
    found, events, cache = look(tmp_path)
    assert (found, events) == ([False] * 6, ["teacher_scores_set_aside"])
    assert len(list((cache.folder / "broken").iterdir())) == 1
    cache.store(ROWS, [make_scores(row) for row in ROWS])
    cache.flush()
    assert look(tmp_path)[:2] == ([True] * 6, [])


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_followed(entry, tmp_path, kind):
    elsewhere = entry.rename(tmp_path / "elsewhere")
    if kind == "link":
        entry.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(entry)
    else:
        entry.mkdir()
    assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])
    assert elsewhere.exists()


def describe(**fields):
    return lambda forgery: forgery.describe(**fields)


def metadata(name, **fields):
    return lambda forgery: forgery.change_metadata(name, **fields)


def put(name, values, dtype):
    return lambda forgery: forgery.put_array(name, np.array(values, dtype=dtype))


def hidden(size):
    """Say that there are hidden states of a size, and store one value."""

    def change(forgery):
        forgery.describe(hidden_size=size)
        put("hidden", [0], "float32")(forgery)

    return change


def with_counts(*counts):
    """Say how many trained tokens each trajectory has; a seventh one has a key of its own."""

    def change(forgery):
        keys = [*forgery.description["counts"], "0" * 64]
        forgery.describe(counts=dict(zip(keys, counts, strict=False)))

    return change


def without(name):
    def change(forgery):
        for file in [each for each in forgery.files if each.startswith(f"{name}/")]:
            del forgery.files[file]

    return change


def with_pickle(forgery):
    codecs = [{"name": "numcodecs.pickle"}, *forgery.metadata("logprobs")["codecs"]]
    forgery.change_metadata("logprobs", codecs=codecs)


CASES = {
    "objects": metadata("logprobs", data_type="object"),
    "float64": metadata("logprobs", data_type="float64"),
    "a shape of 2**50": metadata("logprobs", shape=[1 << 50]),
    "a shape of 10**400": metadata("token_ids", shape=[10**400]),
    "a shape below 0": metadata("logprobs", shape=[-1]),
    "chunks of 0": metadata("logprobs", chunk_grid={"name": "regular", "configuration": {"chunk_shape": [0]}}),
    "pickle": with_pickle,
    "no token ids": without("token_ids"),
    "counts that are none": describe(counts=None),
    "no scores": without("logprobs"),
    "a key too many": with_counts(8, 8, 8, 8, 8, 8, 8),
    "a key too few": with_counts(8, 8, 8, 8, 8),
    "counts that do not add up": with_counts(8, 8, 8, 8, 8, 9),
    "counts below 0": with_counts(-8, 24, 8, 8, 8, 8),
    "counts of 10**400": with_counts(10**400, 8, 8, 8, 8, 8),
    "counts of halves": with_counts(7.5, 8.5, 8, 8, 8, 8),
    "more": describe(surprise=1),
    "scores of another width": put("logprobs", [0] * 48, "float32"),
    "hidden states that are missing": describe(hidden_size=3),
    "hidden states of another size": hidden(3),
    "hidden states below 0": hidden(-3),
    "hidden states of a text": hidden("3"),
    "another format": describe(format="another"),
    "no description": lambda forgery: forgery.put_description({}),
    "no JSON": lambda forgery: forgery.put_description(b"{"),
    "deep lists": lambda forgery: forgery.put_description(b"[" * 100_000),
    "very many values": lambda forgery: forgery.put_description(b"[1" + b",1" * (1 << 21) + b"]"),
    "no root": lambda forgery: forgery.files.pop("zarr.json"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_entry_that_says_the_impossible_with_right_checksums_is_refused(entry, tmp_path, name):
    forge(entry, CASES[name])
    assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])


def test_an_array_of_more_memory_than_is_given_is_refused(entry, tmp_path, monkeypatch):
    monkeypatch.setattr(score_cache, "MAX_ENTRY_BYTES", 100)
    assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])


def test_scores_under_a_wrong_key_are_not_used(entry, tmp_path):
    counts = Forgery(entry).description["counts"]
    first, *others = counts
    forge(entry, describe(counts=dict(zip([*others, first], counts.values(), strict=True))))
    assert look(tmp_path)[:2] == ([False] * 6, [])
