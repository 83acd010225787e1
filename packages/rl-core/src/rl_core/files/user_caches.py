"""The folder for what can be computed again, such as the result of a slow check."""

import os
from pathlib import Path


def cache_folder(project: str) -> Path | None:
    """Return a project's folder in the user's caches, and create it.

    Returns:
        A writable folder; None if there is none, such as in a container whose user has no home folder, or whose HOME
        belongs to another user. Callers then compute again.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / project
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: HOME is unset, and the user has no entry in passwd
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None
