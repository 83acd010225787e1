"""Saved weights are complete or absent, and found by their path."""

import shutil
from pathlib import Path

import pytest

from rl_rollout.gateway import RefusedError
from rl_service.checkpoints import Checkpoints, Saved, expiry, split_path, weights_path

RUN = "0123abcd:train:0"


def record(name, *, segment="weights", saved_at=1.0, **more):
    return Saved(path=weights_path(RUN, segment, name), base_model="m", rank=4, step=3, saved_at=saved_at, **more)


def write(text):
    return lambda folder: (folder / "file").write_text(text)


def test_saved_weights_are_found_again_by_the_next_server(tmp_path):
    saved = Checkpoints(tmp_path).save(record("one"), write("content"))
    again = Checkpoints(tmp_path)
    assert again.find("tinker://0123abcd:train:0/weights/one") == saved
    assert saved.size_bytes == 7
    assert (again.folder_of(saved.path) / "file").read_text() == "content"
    assert again.newest(RUN) == saved


def test_a_save_that_fails_leaves_the_earlier_weights(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.save(record("one"), write("first"))
    with pytest.raises(RefusedError, match="exists already"):
        checkpoints.check_free(saved.path, overwrite=False)

    def fails(folder):
        (folder / "file").write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        checkpoints.save(record("one"), fails)
    assert (checkpoints.folder_of(saved.path) / "file").read_text() == "first"
    checkpoints.save(record("one"), write("second"))
    assert (checkpoints.folder_of(saved.path) / "file").read_text() == "second"


@pytest.mark.parametrize(("renames", "left"), [(0, "old"), (1, "new")])
def test_a_server_killed_while_it_replaces_weights_leaves_the_old_or_the_new_ones(tmp_path, monkeypatch, renames, left):
    checkpoints, rename, done = Checkpoints(tmp_path), Path.rename, []
    path = checkpoints.save(record("one"), write("old")).path

    def dies(*args):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(rename(*args))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(record("one", saved_at=2.0), write("new"))
    again = Checkpoints(tmp_path)
    assert (again.folder_of(path) / "file").read_text() == left
    assert not [*tmp_path.glob("*/*/.*")]


def test_half_removed_weights_do_not_come_back(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.save(record("one"), write("content"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        checkpoints.remove(saved.path)
    assert [*tmp_path.glob("*/*/.*")]
    assert list(Checkpoints(tmp_path)) == []
    assert not [*tmp_path.glob("*/*/.*")]


def test_what_a_killed_server_left_unfinished_is_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.folder_of(checkpoints.save(record("one"), write("first")).path)
    unfinished = folder.with_name(".two")
    unfinished.mkdir()
    assert [saved.path for saved in Checkpoints(tmp_path)] == [weights_path(RUN, "weights", "one")]
    assert not unfinished.exists()


@pytest.mark.parametrize(
    "path",
    ["tinker://a/weights", "tinker://a/other/b", "tinker://../weights/b", "tinker://a/weights/..", "/etc/passwd"],
)
def test_a_path_leads_nowhere_else(path):
    with pytest.raises(RefusedError, match="path must be tinker://RUN/KIND/NAME"):
        split_path(path)
    with pytest.raises(RefusedError, match="path must be a name"):
        weights_path("a", "weights", "../b")


def test_old_snapshots_and_expired_weights_are_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for number in range(4):
        snapshot = record(f"s{number}", segment="sampler_weights", saved_at=number, is_snapshot=True)
        checkpoints.save(snapshot, write("s"))
    checkpoints.save(record("gone", expires_at=2.0), write("old"))
    checkpoints.save(record("kept"), write("new"))
    path = weights_path(RUN, "weights", "gone")
    with pytest.raises(RefusedError, match="may have expired"):
        checkpoints.find(path)
    checkpoints.check_free(path, overwrite=False)
    assert [saved.path.rpartition("/")[2] for saved in checkpoints] == ["kept"]
    checkpoints.sweep(kept_snapshots=2)
    left = sorted(path.parent.name for path in tmp_path.glob("*/*/*/saved.json"))
    assert left == ["kept", "s2", "s3"]


def test_a_time_to_live_has_bounds():
    with pytest.raises(RefusedError, match="ttl_seconds must be from 3600"):
        expiry(60)
    assert expiry(None) is None
    assert expiry(3600) > 3600


def test_removed_weights_are_gone(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.remove(checkpoints.save(record("one"), write("first")).path)
    assert list(Checkpoints(tmp_path)) == []
