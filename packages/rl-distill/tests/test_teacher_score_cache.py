"""The score cache returns stored scores only for the same trajectory and teacher."""

import dataclasses
import errno
import itertools
import multiprocessing
import random
import sys
import time

import numpy as np
import pytest
import structlog
import zarr
from entry_forgery import Forgery
from zarr.storage import ZipStore

from rl_core.data.row_keys import RowKey
from rl_core.errors import CacheError, MissingExtraError
from rl_core.files import array_entries, entry_zip
from rl_distill.teacher.score_cache import ScoreCache, ScoreKind, score_key
from rl_distill.teacher.scores import TeacherRow, TeacherScores

KIND = ScoreKind(teacher="abc", dtype="float32", top_k=3)


def make_row(number, *, length=9):
    rng = np.random.default_rng(number)
    mask = rng.random(length) < 0.6
    mask[0], mask[-1] = False, True
    ids = rng.integers(0, 90, length).astype(np.int32)
    return TeacherRow(key=RowKey(f"p{number}", 0, 0), input_ids=ids, loss_mask=mask)


def make_scores(row, *, kind=KIND, hidden_size=4):
    rng = np.random.default_rng(int(row.input_ids.sum()))
    kept, size = row.loss_mask[:, None], (len(row.input_ids), kind.top_k + 1)
    logprobs = np.where(kept, -rng.random(size), 0).astype(np.float32)
    ids = np.where(kept, rng.integers(0, 90, size), -1).astype(np.int32)
    ids[:, 0] = np.where(row.loss_mask, row.input_ids, -1)
    hidden = np.where(kept, rng.random((size[0], hidden_size)), 0).astype(np.float32) if kind.with_hidden else None
    return TeacherScores(logprobs=logprobs, token_ids=ids, hidden=hidden)


def make_rows(count, *, first=0):
    return [make_row(number, length=5 + number % 7) for number in range(first, first + count)]


def filled(directory, rows, *, kind=KIND):
    cache = ScoreCache(directory, kind)
    cache.store(rows, [make_scores(row, kind=kind) for row in rows])
    cache.flush()
    return cache


def is_equal(found, row, *, kind=KIND):
    expected = make_scores(row, kind=kind)
    pairs = [(getattr(found, field.name), getattr(expected, field.name)) for field in dataclasses.fields(expected)]
    return all(
        (own is None and other is None) or (own.dtype == other.dtype and np.array_equal(own, other))
        for own, other in pairs
    )


@pytest.mark.parametrize(
    "kind", [KIND, dataclasses.replace(KIND, top_k=0), dataclasses.replace(KIND, with_hidden=True)]
)
@pytest.mark.parametrize("is_flushed", [False, True])
def test_what_was_stored_is_given_back(tmp_path, kind, is_flushed):
    rows = make_rows(20)
    cache = ScoreCache(tmp_path / "cache", kind)
    assert cache.lookup(rows) == [None] * 20
    cache.store(rows, [make_scores(row, kind=kind) for row in rows])
    if is_flushed:
        cache.flush()
        cache = ScoreCache(tmp_path / "cache", kind)
    assert len(cache) == 20
    order = [7, 3, 19, 3, 0]
    for found, number in zip(cache.lookup([rows[number] for number in order]), order, strict=True):
        assert is_equal(found, rows[number], kind=kind)


def test_many_trajectories_are_one_entry(tmp_path):
    cache = filled(tmp_path, make_rows(300))
    assert len(list(cache.folder.glob("scores-*"))) == 1


def test_an_entry_is_written_when_enough_is_kept(tmp_path):
    rows = make_rows(40)
    cache = ScoreCache(tmp_path, KIND, max_pending_bytes=500)
    for row in rows:
        cache.store([row], [make_scores(row)])
    assert 4 <= len(list(cache.folder.glob("scores-*"))) < 20
    assert [is_equal(found, row) for found, row in zip(cache.lookup(rows), rows, strict=True)] == [True] * len(rows)
    assert rows


def test_a_trajectory_is_stored_once(tmp_path):
    rows = make_rows(5)
    cache = filled(tmp_path, rows)
    cache.store(rows, [make_scores(row) for row in rows])
    cache.flush()
    assert len(list(cache.folder.glob("scores-*"))) == 1


@pytest.mark.parametrize(
    "other",
    [{"teacher": "abd"}, {"dtype": "bfloat16"}, {"top_k": 4}, {"temperature": 2.0}, {"with_hidden": True}],
    ids=str,
)
def test_scores_of_another_kind_are_not_found(tmp_path, other):
    rows = make_rows(2)
    filled(tmp_path, rows)
    assert ScoreCache(tmp_path, dataclasses.replace(KIND, **other)).lookup(rows) == [None, None]


def test_another_token_or_mask_is_another_trajectory(tmp_path):
    row = make_row(1)
    cache = filled(tmp_path, [row])
    ids, mask = row.input_ids.copy(), row.loss_mask.copy()
    ids[0] += 1
    mask[-1] = False
    others = [dataclasses.replace(row, input_ids=ids), dataclasses.replace(row, loss_mask=mask)]
    shorter = dataclasses.replace(row, input_ids=row.input_ids[:-1], loss_mask=row.loss_mask[:-1])
    assert cache.lookup([*others, shorter]) == [None] * 3
    assert len({score_key(KIND, one) for one in [row, *others, shorter]}) == 4
    assert is_equal(cache.lookup([dataclasses.replace(row, key=RowKey("q", 3, 1))])[0], row)  # from another session


def test_scores_of_another_shape_are_refused(tmp_path):
    cache, row = ScoreCache(tmp_path, KIND), make_row(1)
    with pytest.raises(CacheError, match=r"shape \[9, 4\] and no hidden states; found \[9, 1\]"):
        cache.store([row], [make_scores(row, kind=dataclasses.replace(KIND, top_k=0))])


def test_several_caches_find_what_the_others_store(tmp_path):
    rows = make_rows(12)
    caches = [ScoreCache(tmp_path, KIND) for _ in range(3)]
    for number, cache in enumerate(caches):
        own = rows[4 * number : 4 * number + 4]
        cache.store(own, [make_scores(row) for row in own])
        cache.flush()
    for cache in caches:
        assert [is_equal(found, row) for found, row in zip(cache.lookup(rows), rows, strict=True)] == [True] * len(rows)
        assert rows


def store_some(directory, first):
    for number in range(first, first + 10):
        filled(directory, make_rows(3, first=3 * number))


def test_writers_of_several_processes_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=store_some, args=(tmp_path, first)) for first in (0, 5, 10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    rows = make_rows(60)
    cache = ScoreCache(tmp_path, KIND)
    assert [is_equal(found, row) for found, row in zip(cache.lookup(rows), rows, strict=True)] == [True] * len(rows)
    assert rows
    assert not list(cache.folder.glob(".writing-*"))


def test_zarr_opens_every_array(tmp_path):
    rows = make_rows(30)
    cache = filled(tmp_path, rows)
    (entry,) = cache.folder.glob("scores-*")
    found = {name: array[:] for name, array in zarr.open_group(ZipStore(entry), mode="r").arrays()}
    assert sorted(found) == ["logprobs", "token_ids"]
    assert Forgery(entry).description["counts"] == {score_key(KIND, row): int(row.loss_mask.sum()) for row in rows}
    assert np.array_equal(
        found["logprobs"], np.concatenate([make_scores(row).logprobs[row.loss_mask].reshape(-1) for row in rows])
    )


def test_trajectories_over_several_chunks_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(entry_zip, "MAX_CHUNK_BYTES", 64)
    rows = make_rows(20)
    cache = filled(tmp_path, rows)
    (entry,) = cache.folder.glob("scores-*")
    assert sum(file.startswith("logprobs/c/") for file in Forgery(entry).files) > 20
    for order in (range(20), [13, 2, 19]):
        found = cache.lookup([rows[number] for number in order])
        assert [is_equal(one, rows[number]) for one, number in zip(found, order, strict=True)] == [True] * len(order)


def test_an_entry_says_whose_scores_it_has(tmp_path):
    (entry,) = filled(tmp_path, make_rows(2)).folder.glob("scores-*")
    assert Forgery(entry).description["kind"] == dataclasses.asdict(KIND)


def test_entries_of_an_earlier_format_are_refused_by_its_number(tmp_path):
    (ScoreCache(tmp_path, KIND).folder / "scores-0123").mkdir()
    with pytest.raises(CacheError, match=r"distillation\.cache: .* format 1, such as scores-0123; .* reads format 2"):
        ScoreCache(tmp_path, KIND)


def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch):
    rows = make_rows(8)
    cache = filled(tmp_path, rows[:4])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(array_entries.os, "fsync", full)
    with structlog.testing.capture_logs() as events:
        cache.store(rows[4:6], [make_scores(row) for row in rows[4:6]])
        cache.flush()
        cache.store(rows[6:], [make_scores(row) for row in rows[6:]])
        cache.flush()
    assert [(event["event"], event["trajectories"]) for event in events] == [("teacher_scores_not_stored", 2)]
    assert "No space left on device. Make room" in events[0]["error"]
    assert isinstance(cache.failure, CacheError)
    assert [found is not None for found in cache.lookup(rows)] == [True] * 4 + [False] * 4
    assert not list(cache.folder.glob(".writing-*"))


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_builds_stays(tmp_path):
    cache = ScoreCache(tmp_path, KIND)
    (cache.folder / ".writing-0123").write_text("torn")
    with cache._stored._new_file("scores-1") as (_, living):
        ScoreCache(tmp_path, KIND)
        assert list(map(str, cache.folder.glob(".writing-*"))) == [living]


def test_a_place_that_cannot_be_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"distillation\.cache: .* cannot be created: Not a directory"):
        ScoreCache(tmp_path / "file", KIND)


def test_an_entry_that_somebody_removed_is_scored_anew(tmp_path):
    rows = make_rows(4)
    cache = filled(tmp_path, rows)
    (entry,) = cache.folder.glob("scores-*")
    entry.unlink()
    with structlog.testing.capture_logs() as events:
        assert cache.lookup(rows) == [None] * 4
    assert events == []
    cache.store(rows, [make_scores(row) for row in rows])
    cache.flush()
    assert [is_equal(found, row) for found, row in zip(cache.lookup(rows), rows, strict=True)] == [True] * len(rows)
    assert rows


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingExtraError, match=r"Install the extra rl-distill\[cache\]"):
        ScoreCache(tmp_path, KIND)


def store_for_ever(directory, first):
    cache = ScoreCache(directory, KIND, max_pending_bytes=1)
    for number in itertools.count(first):
        row = make_row(number)
        cache.store([row], [make_scores(row)])


def test_a_writer_killed_at_any_point_leaves_whole_entries_alone(tmp_path, seed):
    rng, context = random.Random(seed), multiprocessing.get_context("fork")
    folder = ScoreCache(tmp_path, KIND).folder
    for kill in range(6):
        before = len(list(folder.glob("scores-*")))
        writer = context.Process(target=store_for_ever, args=(tmp_path, 1000 * kill))
        writer.start()
        wanted, deadline = before + rng.randint(1, 8), time.monotonic() + 60
        while len(list(folder.glob("scores-*"))) < wanted:
            assert writer.is_alive()
            assert time.monotonic() < deadline, "the writer stored too little"
        writer.kill()
        writer.join(60)
        rows = [make_row(1000 * kill + number) for number in range(wanted - before)]
        with structlog.testing.capture_logs() as events:
            cache = ScoreCache(tmp_path, KIND)
            assert [is_equal(found, row) for found, row in zip(cache.lookup(rows), rows, strict=True)] == [True] * len(
                rows
            )
            assert rows
        assert events == []
        assert not list(folder.glob(".writing-*"))
