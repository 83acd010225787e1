"""Temporary folder of one sandbox, locked while its process lives, so that a later process can remove a stale one."""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rl_core.files import make_locked_folder, remove_unlocked_folders

FIRST_UID, NUM_UIDS, NOBODY = 61184, 4096, 65534
"""User ids of programs, which own their folders."""
FOLDER_PREFIX = "rl-sandbox-"


@contextlib.contextmanager
def sandbox_folder(uid: int | None) -> Iterator[str]:
    """Make a temporary folder of a user, and remove it afterwards."""
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    path, lock = make_locked_folder(parent, FOLDER_PREFIX, mode=0o700)
    folder = str(path)
    try:
        if uid is not None:
            os.chown(folder, uid, uid)
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def remove(folder: str) -> None:
    """Remove a folder, whatever a program left in it."""
    with contextlib.suppress(RecursionError):  # deeply nested folders
        shutil.rmtree(folder, ignore_errors=True)
    if Path(folder).exists():  # for example read-only folders of package managers
        subprocess.run(["/bin/chmod", "-R", "u+rwX", folder], check=False, stderr=subprocess.DEVNULL)  # noqa: S603
        subprocess.run(["/bin/rm", "-rf", folder], check=False)  # noqa: S603 (our own folder)


@functools.cache
def _sweep(parent: Path) -> None:
    """Remove the folders of killed processes, once per process."""
    others = (*range(FIRST_UID, FIRST_UID + NUM_UIDS), NOBODY) if os.geteuid() == 0 else ()
    remove_unlocked_folders(parent.glob(f"{FOLDER_PREFIX}*"), also_of=others)
