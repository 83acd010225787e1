"""Prepare the mixture example if necessary, then train it.

python examples/mixture/run.py [--async | --ray] [any option of `train`]

`--async` trains with `rl-async-trainer` and async.toml instead of `rl-sync-trainer` and settings.toml; `--ray` uses
ray.toml, in which two engines and two learner ranks that share the experts are Ray actors.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import prepare

FOLDER = Path(__file__).parent
TRAINERS = {"--async": ("rl_async_trainer.main", "async.toml"), "--ray": ("rl_async_trainer.main", "ray.toml")}
SYNC = ("rl_sync_trainer.main", "settings.toml")


def main(arguments: Sequence[str]) -> None:
    """Run the example; the trainer replaces this process."""
    words = [word for word in arguments if word not in TRAINERS]
    chosen = [TRAINERS[word] for word in arguments if word in TRAINERS]
    if {"--help", "-h"} & {*words}:
        print(__doc__)  # the trainer's help follows
    elif not prepare.SOURCE.is_prepared(prepare.MIXTURE):
        prepare.SOURCE.prepare(example=prepare.MIXTURE)
    module, settings = chosen[-1] if chosen else SYNC
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, "train", str(FOLDER / settings), *words])


if __name__ == "__main__":
    main(sys.argv[1:])
