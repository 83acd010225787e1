"""The temporary folder of one sandbox: locked while its process lives, so that a later one removes what is left."""

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
"""The users of programs, which own their folders."""
FOLDER_PREFIX = "rl-sandbox-"


@contextlib.contextmanager
def sandbox_folder(uid: int | None) -> Iterator[str]:
    """A temporary folder of a user, gone afterwards."""
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
    """Remove a folder, whatever a program made of it."""
    with contextlib.suppress(RecursionError):  # folders in folders in folders
        shutil.rmtree(folder, ignore_errors=True)
    if Path(folder).exists():  # or such as nobody may write, which package managers make
        subprocess.run(["/bin/chmod", "-R", "u+rwX", folder], check=False, stderr=subprocess.DEVNULL)  # noqa: S603
        subprocess.run(["/bin/rm", "-rf", folder], check=False)  # noqa: S603 (our own folder)


@functools.cache
def _sweep(parent: Path) -> None:
    """Remove the folders of killed processes, once in the life of this one."""
    others = (*range(FIRST_UID, FIRST_UID + NUM_UIDS), NOBODY) if os.geteuid() == 0 else ()
    remove_unlocked_folders(parent.glob(f"{FOLDER_PREFIX}*"), also_of=others)
