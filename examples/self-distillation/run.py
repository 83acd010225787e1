"""Prepare the self-distillation example if necessary, then train it.

python examples/self-distillation/run.py [any option of `rl-sync-trainer train`]
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import prepare

FOLDER = Path(__file__).parent


def main(arguments: Sequence[str]) -> None:
    """Run the example; the trainer replaces this process."""
    if {"--help", "-h"} & {*arguments}:
        print(__doc__)  # the trainer's help follows
    elif not prepare.is_prepared():
        prepare.prepare()
    words = ["-m", "rl_sync_trainer.main", "train", str(FOLDER / "settings.toml"), *arguments]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
