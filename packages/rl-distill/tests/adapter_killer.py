"""Save an adapter's checkpoint in processes that are killed before one of their file operations."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from checkpoint_killer import complain, kill_before

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.row_keys import RowKey
from rl_distill.checkpoints.store import CheckpointStore
from rl_distill.learner import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.options import LoraOptions

EVERY = 6


def make_learner(policy: Path) -> MegatronLearner:
    return MegatronLearner(policy, LearnerOptions(learning_rate=1e-2, num_threads=1), lora=LoraOptions(rank=2))


def main(directory: Path, policy: Path) -> None:
    """Save the checkpoint of step 1, then kill saves of step 2 at later and later operations until one completes."""
    learner, other = make_learner(policy), make_learner(policy)
    columns = {"input_ids": np.arange(3, 9), "loss_mask": np.ones(6, bool), "loss_weights": np.full(6, 0.1, "float32")}
    batch = Batch(
        [RowKey("p", 0, 0)], {name: Ragged.from_rows([row], dtype=str(row.dtype)) for name, row in columns.items()}
    )
    expected: dict[int, dict[str, torch.Tensor]] = {}
    store = CheckpointStore(directory, keep=2)
    for step in (1, 2):
        learner.train_step(batch, supervised_objective)
        expected[step] = {name: tensor.clone() for name, tensor in learner.export_adapter().items()}
        if step == 1:
            store.begin(step, {}, learner.save)
            store.wait()
    number, is_killed = 1, True
    while is_killed:
        child = os.fork()
        if child == 0:
            kill_before(number, directory)
            store.begin(2, {}, lambda folder: learner.save(folder, in_background=True))
            store.wait()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        is_killed = os.WIFSIGNALED(status)
        newest = store.newest(complain)
        other.load(newest)
        found = other.export_adapter()
        is_equal = all(torch.equal(tensor, found[name]) for name, tensor in expected[other.step].items())
        sys.stdout.write(json.dumps({"killed": is_killed, "step": other.step, "is_equal": is_equal}) + "\n")
        number += EVERY


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
