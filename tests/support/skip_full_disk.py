"""Store an entry on memory disks of increasing size, and print each result; needs permission to mount."""

import json
import os
import subprocess
import sys
from pathlib import Path

from skip_groups import make_groups

from rl_core.errors import CacheError
from rl_rollout.skip import EntryKey, EntryStore

NO_MOUNT = 77


def main() -> int:
    """Mount, store, check, unmount."""
    place = Path(sys.argv[1])
    for kib in range(4, 48, 4):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(place)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            return NO_MOUNT
        error = None
        try:
            store = EntryStore(str(place))
            store.write(EntryKey(step=1), make_groups(), fingerprint={}, generate_s=1.0)
            store.read(EntryKey(step=1))
        except CacheError as raised:
            error = str(raised)
        left = sorted(path.name for path in place.iterdir())
        subprocess.run(["umount", str(place)], check=True)
        os.write(1, (json.dumps({"kib": kib, "error": error, "left": left}) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
