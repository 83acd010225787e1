"""The umask of this process, which sets the permissions of new files."""

import os
import re
from pathlib import Path


def current_umask() -> int:
    """Return the umask of this process, without changing it if the kernel reports it."""
    try:
        match = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is not None:
        return int(match[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
