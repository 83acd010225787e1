"""Locks of folders and files that other users, forks and sweeps cannot acquire."""

import fcntl
import gc
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_core.files import locked_folder, make_locked_folder, open_lock_file, remove_unlocked_folders
from rl_core.queue.journal.database import lock_directory

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def in_a_fork(act, *, user=None):
    """Run `act` in a forked child, optionally as another user; return its exit status, 1 if it raised."""
    child = os.fork()
    if child == 0:
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_that_lets_its_copy_go_leaves_the_folder_to_its_maker(tmp_path: Path):
    stack = ExitStack()
    folder = stack.enter_context(locked_folder(tmp_path, "own-"))
    assert in_a_fork(lambda: (stack.close(), gc.collect())) == 0
    assert folder.is_dir()
    remove_unlocked_folders([folder])
    assert folder.is_dir()  # the process that made it still holds the lock
    stack.close()
    assert not folder.exists()


@pytest.mark.parametrize("held", ["folder", "file"])
def test_a_folder_with_a_second_lock_stays_while_either_is_held(tmp_path: Path, held: str):
    folder, lock = make_locked_folder(tmp_path, "two-")
    (folder / "lock").touch()
    second = os.open(folder / "lock", os.O_RDWR)
    if held == "file":
        fcntl.flock(second, fcntl.LOCK_EX)
        os.close(lock)
    remove_unlocked_folders([folder], lock_file="lock")
    assert folder.is_dir()
    os.close(second if held == "file" else lock)
    remove_unlocked_folders([folder], lock_file="lock")
    assert not folder.exists()
    if held == "folder":
        os.close(second)


def test_a_folder_whose_second_lock_was_never_made_goes(tmp_path: Path):
    folder, lock = make_locked_folder(tmp_path, "two-")
    os.close(lock)
    remove_unlocked_folders([folder], lock_file="lock")
    assert not folder.exists()


@needs_root
def test_the_folder_of_another_user_is_not_swept(tmp_path: Path):
    folder, lock = make_locked_folder(tmp_path, "theirs-")
    os.close(lock)
    os.chown(folder, NOBODY, NOBODY)
    remove_unlocked_folders([folder])
    assert folder.is_dir()


@needs_root
def test_another_user_cannot_lock_a_lock_file():
    parent = Path("/tmp") / f"locks-{os.getpid()}"  # the other user can enter this folder
    parent.mkdir(mode=0o755)
    try:
        os.close(open_lock_file(parent / ".lock"))
        assert in_a_fork(lambda: os.open(parent / ".lock", os.O_RDONLY), user=NOBODY) == 1
        assert in_a_fork(lambda: list(parent.iterdir()), user=NOBODY) == 0  # the other user can read the folder itself
    finally:
        shutil.rmtree(parent)


def test_a_link_is_no_lock_file(tmp_path: Path):
    (tmp_path / "other").touch()
    (tmp_path / "lock").symlink_to("other")
    with pytest.raises(OSError, match="symbolic"):
        open_lock_file(tmp_path / "lock")
    with pytest.raises(OSError, match="symbolic"):
        lock_directory(tmp_path)
