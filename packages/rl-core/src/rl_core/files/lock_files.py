"""Lock files that only their owner can lock."""

import os
import stat
from pathlib import Path

from rl_core.record_fields import converts_arguments


@converts_arguments
def open_lock_file(path: Path) -> int:
    """Open or create a lock file and return its descriptor, not yet locked.

    Other users cannot open or lock the file, and cannot have created it.

    Raises:
        OSError: The path is a link, has several names, is not a file, belongs to another user, or cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        found, folder = os.fstat(descriptor), path.parent.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise PermissionError(
                f"{path} must be a regular file with one hard link; found another kind of file or more links"
            )
        own = (os.geteuid(), folder.st_uid) if os.geteuid() == 0 else (os.geteuid(),)
        if found.st_uid not in own:
            raise PermissionError(f"{path} must belong to user {os.geteuid()}; found user {found.st_uid}")
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o600:
            os.fchmod(descriptor, 0o600)  # created by an earlier version, or with another umask
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
