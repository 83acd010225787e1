"""The loop's state is restored unchanged from a checkpoint."""

from dataclasses import asdict
from pathlib import Path

import pytest

from rl_core.errors import CheckpointError
from rl_distill.background import PendingSave
from rl_distill.checkpoints.store import CheckpointStore
from rl_sync_trainer.assemble import TrainerState
from rl_trainer_parts.run.folder import read_run_state


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = TrainerState(
        step=7,
        policy_version=9,
        prompt_source={"epoch": 1, "position": 3},
        num_samples=448,
        wall_s=12.25,
        steps_wall_s=0.1 + 0.2,
        results={"validation_accuracy_first": 1 / 3},
        unlogged={"actor/entropy": 0.1},
    )
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.begin(7, asdict(state), lambda folder: PendingSave())
    store.wait()
    assert read_run_state(tmp_path / "checkpoints" / "step_7", TrainerState) == state


@pytest.mark.parametrize("content", ["", "[]", '{"steps": 3}', "null"])
def test_a_state_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "trainer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        read_run_state(tmp_path, TrainerState)
