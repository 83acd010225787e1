import os

import pytest

from rl_core.files.durable import sync_file, sync_folder, write_durably


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "state.json"
    write_durably(file, b"old")
    write_durably(file, b"new and longer")
    assert file.read_bytes() == b"new and longer"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "state.json"
    write_durably(file, b"old")

    def fails(_descriptor):
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no space"):
        write_durably(file, b"new")
    assert file.read_bytes() == b"old"
    sync_folder(tmp_path)  # some file systems cannot sync folders; that is no error
    with pytest.raises(OSError, match="no space"):
        sync_file(file)
