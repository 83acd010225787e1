"""Torn or forged entries: their trajectories are scored again, without other effects."""

import hashlib
import json
import os
import shutil

import msgspec
import numpy as np
import pytest
import structlog

from rl_core.data.row_keys import RowKey
from rl_core.files.durable import checksum
from rl_distill.teacher import score_entries
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
    monkeypatch.setattr(score_entries, "CHUNK_BYTES", 256)
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


def change_manifest(entry, change):
    content = json.loads((entry / "manifest.json").read_bytes())["manifest"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (entry / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": content}))


def test_a_whole_entry_is_found(entry, tmp_path):
    assert look(tmp_path)[:2] == ([True] * 6, [])


def test_no_flipped_bit_gives_other_scores_and_the_entry_is_set_aside(entry, tmp_path):
    spare = tmp_path / "spare"
    shutil.copytree(entry, spare)
    files = [path.relative_to(spare) for path in sorted(spare.rglob("*")) if path.is_file()]
    assert len(files) > 8
    for file in files:
        content = bytearray((spare / file).read_bytes())
        for place in {0, len(content) // 2, len(content) - 1}:
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            shutil.rmtree(entry, ignore_errors=True)
            shutil.copytree(spare, entry)
            (entry / file).write_bytes(changed)
            found, events, cache = look(tmp_path)
            assert found == [False] * 6, (file, place)
            assert events == ["teacher_scores_set_aside"], (file, place)
            assert not entry.exists()
            assert len(list((cache.folder / "broken").iterdir())) == 1
            shutil.rmtree(cache.folder / "broken")


def test_a_missing_or_shortened_file_is_found(entry, tmp_path):
    spare = tmp_path / "spare"
    shutil.copytree(entry, spare)
    files = [path.relative_to(spare) for path in sorted(spare.rglob("*")) if path.is_file()]
    for file in files:
        for is_missing in (False, True):
            shutil.rmtree(entry, ignore_errors=True)
            shutil.copytree(spare, entry)
            os.truncate(entry / file, (entry / file).stat().st_size - 1)
            if is_missing:
                (entry / file).unlink()
            assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])


def test_what_was_set_aside_is_scored_and_stored_anew(entry, tmp_path):
    (entry / "manifest.json").write_text("{}")
    _, _, cache = look(tmp_path)
    cache.store(ROWS, [make_scores(row) for row in ROWS])
    cache.flush()
    assert look(tmp_path)[:2] == ([True] * 6, [])


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_followed(entry, tmp_path, kind):
    for name in ("manifest.json", "keys/c/0"):
        file = entry / name
        if not file.exists():
            continue
        content = file.read_bytes()
        file.unlink()
        if kind == "link":
            (tmp_path / "elsewhere").write_bytes(content)
            file.symlink_to(tmp_path / "elsewhere")
        elif kind == "pipe":
            os.mkfifo(file)
        else:
            file.mkdir()
        assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])


def set_array(name, **fields):
    return lambda content: content["arrays"][name].update(fields)


@pytest.mark.parametrize(
    "change",
    [
        set_array("logprobs", dtype="object"),
        set_array("logprobs", dtype="float64"),
        set_array("logprobs", shape=[1 << 50]),
        set_array("logprobs", shape=[-1]),
        set_array("logprobs", chunk_length=0),
        set_array("logprobs", chunk_length=1 << 40),
        set_array("logprobs", chunks=[]),
        set_array("keys", shape=[7 * 32]),
        set_array("counts", is_compressed=False),
        lambda content: content.update(width=0),
        lambda content: content.update(width=5),
        lambda content: content.update(num_rows=7),
        lambda content: content.update(num_rows=1 << 40),
        lambda content: content.update(hidden_size=3),
        lambda content: content.update(format="another"),
        lambda content: content.update(format_version=2),
        lambda content: content.update(more=1),
        lambda content: content["arrays"].pop("counts"),
        lambda content: content["arrays"].update({"../x": content["arrays"]["counts"]}),
    ],
)
def test_a_manifest_that_says_the_impossible_with_a_right_checksum_is_refused(entry, tmp_path, change):
    change_manifest(entry, change)
    assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b"[1" + b",1" * (1 << 21) + b"]"], ids=len)
def test_a_manifest_that_is_none_is_refused(entry, tmp_path, raw):
    (entry / "manifest.json").write_bytes(raw)
    assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])


def forge_array(entry, name, values):
    """Replace the values of an array, with valid checksums."""
    spec, files = score_entries.encode_array(values, score_entries.plan_array(values, compress=True, chunk_bytes=256))
    shutil.rmtree(entry / name)
    (entry / name / "c").mkdir(parents=True)
    for file, parts in files.items():
        (entry / name / file).write_bytes(b"".join(parts))
    content = json.loads(json.dumps(msgspec.to_builtins(spec)))
    change_manifest(entry, lambda manifest: manifest["arrays"].update({name: content}))


def test_counts_of_tokens_that_do_not_add_up_are_refused(entry, tmp_path):
    for counts in ([8, 8, 8, 8, 8, 9], [-8, 24, 8, 8, 8, 8]):
        if entry.exists():
            forge_array(entry, "counts", np.asarray(counts, dtype=np.int32))
            assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])


def test_negative_counts_are_refused(entry, tmp_path):
    forge_array(entry, "counts", np.asarray([-8, 24, 8, 8, 8, 8], dtype=np.int32))
    assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])


def test_scores_under_a_wrong_key_are_not_used(entry, tmp_path):
    keys = np.frombuffer(b"".join(ScoreCache(tmp_path, KIND)._entries[entry.name].keys), dtype=np.uint8).copy()
    forge_array(entry, "keys", np.roll(keys, 32))
    found, events, _ = look(tmp_path)
    assert found == [False] * 6
    assert events == []


def test_a_forged_metadata_with_right_checksums_is_refused(entry, tmp_path):
    file = entry / "logprobs" / "zarr.json"
    metadata = json.loads(file.read_bytes())
    metadata["codecs"].insert(0, {"name": "numcodecs.pickle"})
    raw = json.dumps(metadata).encode()
    file.write_bytes(raw)
    change_manifest(entry, set_array("logprobs", metadata={"size_bytes": len(raw), "crc32c": checksum(raw)}))
    assert look(tmp_path)[:2] == ([False] * 6, ["teacher_scores_set_aside"])
