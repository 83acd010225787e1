"""Access to a run's folder: its mode, and the umask of the run's processes."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from rl_core.errors import SettingsError
from rl_trainer_parts.settings.schema import ReadableBy

WITHHELD: Mapping[ReadableBy, int] = {"owner": 0o077, "group": 0o027, "everyone": 0o022}
"""The umask for each setting."""


def make_run_folder(path: Path, umask: int) -> None:
    """Create a folder whose mode follows a umask, or change an existing one's mode.

    Raises:
        SettingsError: The folder belongs to another user, who could read and change its files, or keeps another mode.
        OSError: The folder cannot be created.
    """
    path.mkdir(exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        raise SettingsError(
            f"run folder {path} must belong to user {os.geteuid()}; found user {found.st_uid}, who could read and "
            "change the run. Choose another folder with --run.directory=FOLDER or another name with --run.name=NAME."
        )
    mode = stat.S_IMODE(found.st_mode)
    wanted = (mode & ~0o777) | (0o777 & ~umask)
    if mode == wanted:
        return
    path.chmod(wanted)
    left = stat.S_IMODE(path.stat().st_mode) & umask
    if left:
        raise SettingsError(
            f"run folder {path} must not have the mode bits {umask:03o}; its file system keeps {left:03o}. "
            "Choose another folder with --run.directory=FOLDER, or accept it with --run.readable_by=everyone."
        )
