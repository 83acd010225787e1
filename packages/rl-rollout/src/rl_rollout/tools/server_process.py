"""Become a server that ends with this program's parent, together with all of its processes.

Usage: `python -I -S server_process.py GUARD MARK PARENT COMMAND...`, in its own session. It needs only the standard
library. `GUARD` is the file of `rl_core.cluster.processes.guard`, which watches this process and its parent. When one
of them ends, the guard kills every process of this session or with the mark in its environment.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start the guard, then become the command."""
    guard, mark, parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # exec keeps it
    if os.getppid() != int(parent):
        sys.exit()
    own = str(os.getpid())
    subprocess.run(  # noqa: S603 - our own file
        [sys.executable, "-I", "-S", guard, mark, own, "", own, parent],
        env={},
        check=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}. Install it, or give the full path of an executable file")


if __name__ == "__main__":
    main()
