"""Prepare the model of the tools example where needed, then train it with this example's agent.

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
    """Run the example; the trainer takes this process's place."""
    if {"--help", "-h"} & {*arguments}:
        print(__doc__)  # what follows is the trainer's own
    else:
        subprocess.run([sys.executable, PREPARE], check=True)
    sys.stdout.flush()
    settings = str(FOLDER / "settings.toml")
    os.execv(sys.executable, [sys.executable, "-m", "rl_sync_trainer.main", "train", settings, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
