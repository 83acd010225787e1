"""Prepare the model of the tools example if necessary, then train it with this example's agent.

python examples/agent/run.py [any option of `rl-sync-trainer train`]
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PREPARE = FOLDER.parent / "tools" / "prepare.py"


def main(arguments: Sequence[str]) -> None:
    """Run the example; the trainer replaces this process."""
    if {"--help", "-h"} & {*arguments}:
        print(__doc__)  # the trainer's help follows
    else:
        subprocess.run([sys.executable, PREPARE], check=True)
    sys.stdout.flush()
    settings = str(FOLDER / "settings.toml")
    os.execv(sys.executable, [sys.executable, "-m", "rl_sync_trainer.main", "train", settings, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
