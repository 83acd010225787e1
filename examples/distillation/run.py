"""Prepare the distillation example where needed, then train it.

python examples/distillation/run.py [--grpo] [any option of `rl-sync-trainer train`]

`--grpo` trains the same student without its teacher, by rewards alone.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import prepare

FOLDER = Path(__file__).parent


def main(arguments: Sequence[str]) -> None:
    """Run the example; the trainer takes this process's place."""
    words = [word for word in arguments if word != "--grpo"]
    if {"--help", "-h"} & {*words}:
        print(__doc__)  # what follows is the trainer's own
    elif not prepare.is_prepared():
        prepare.prepare()
    settings = FOLDER / ("grpo.toml" if len(words) < len(arguments) else "settings.toml")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rl_sync_trainer.main", "train", str(settings), *words])


if __name__ == "__main__":
    main(sys.argv[1:])
