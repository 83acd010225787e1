"""Prepare the images example if necessary, then train it.

python examples/images/run.py [--async] [any option of `train`]

`--async` trains with `rl-async-trainer` and async.toml instead of `rl-sync-trainer` and settings.toml.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import prepare

FOLDER = Path(__file__).parent


def main(arguments: Sequence[str]) -> None:
    """Run the example; the trainer replaces this process."""
    words = [word for word in arguments if word != "--async"]
    is_async = len(words) < len(arguments)
    module, settings = ("rl_async_trainer", "async.toml") if is_async else ("rl_sync_trainer", "settings.toml")
    if {"--help", "-h"} & {*words}:
        print(__doc__)  # the trainer's help follows
    elif not prepare.is_prepared():
        prepare.prepare()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"{module}.main", "train", str(FOLDER / settings), *words])


if __name__ == "__main__":
    main(sys.argv[1:])
