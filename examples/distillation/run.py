"""Prepare the distillation example if necessary, then train it.

python examples/distillation/run.py [--grpo] [any option of `rl-sync-trainer train`]

`--grpo` trains the same student without a teacher, on rewards alone.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import prepare

FOLDER = Path(__file__).parent


def main(arguments: Sequence[str]) -> None:
    """Run the example; the trainer replaces this process."""
    words = [word for word in arguments if word != "--grpo"]
    if {"--help", "-h"} & {*words}:
        print(__doc__)  # the trainer's help follows
    elif not prepare.is_prepared():
        prepare.prepare()
    settings = FOLDER / ("grpo.toml" if len(words) < len(arguments) else "settings.toml")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rl_sync_trainer.main", "train", str(settings), *words])


if __name__ == "__main__":
    main(sys.argv[1:])
