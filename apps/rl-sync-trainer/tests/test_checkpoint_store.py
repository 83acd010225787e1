"""Checkpoints survive a crash at any point, and a damaged one is never loaded."""

import json
import os
from pathlib import Path

import pytest

from rl_core.errors import CheckpointError
from rl_sync_trainer.checkpoints import (
    CheckpointStore,
    TrainerState,
    file_crc32c,
    read_trainer_state,
    verify_checkpoint,
    write_durably,
)


def write_learner(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "learner.json").write_text("{}")


def cut_short(folder: Path) -> None:
    (folder / "half").write_bytes(b"half")
    raise KeyboardInterrupt


def saved(store: CheckpointStore, *steps: int) -> list[Path]:
    return [store.save(TrainerState(step=step), write_learner) for step in steps]


def newest_of(store: CheckpointStore) -> tuple[str | None, list[str]]:
    """Name of the newest whole checkpoint, and what was said about others."""
    complaints: list[CheckpointError] = []
    found = store.newest(complaints.append)
    return found and found.name, [str(error) for error in complaints]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_nothing_is_there_at_first(store: CheckpointStore, folder: Path) -> None:
    assert store.steps() == []
    assert newest_of(store) == (None, [])
    assert not folder.exists()


def test_the_state_comes_back_as_it_was(store: CheckpointStore) -> None:
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
    assert read_trainer_state(store.save(state, write_learner)) == state


def test_the_newest_are_kept_by_number(store: CheckpointStore) -> None:
    saved(store, 2, 9, 10)
    assert store.steps() == [9, 10]
    assert newest_of(store) == ("step_10", [])


def test_saving_a_step_again_replaces_it(store: CheckpointStore, folder: Path) -> None:
    store.save(TrainerState(step=3, num_samples=1), write_learner)
    path = store.save(TrainerState(step=3, num_samples=2), write_learner)
    assert read_trainer_state(path).num_samples == 2
    assert [entry.name for entry in folder.iterdir()] == ["step_3"]


def test_a_crash_while_writing_leaves_the_older_one(store: CheckpointStore, folder: Path) -> None:
    saved(store, 1)
    with pytest.raises(KeyboardInterrupt):
        store.save(TrainerState(step=2), cut_short)
    assert (folder / ".step_2.part" / "half").exists()
    assert store.steps() == [1]
    assert newest_of(store) == ("step_1", [])
    saved(store, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]


def test_a_crash_while_replacing_gives_the_old_one_back(store: CheckpointStore, folder: Path) -> None:
    saved(store, 1, 2)
    (folder / "step_2").rename(folder / ".step_2.old")
    assert newest_of(store) == ("step_2", [])
    (folder / "step_2").rename(folder / ".step_2.old")
    saved(store, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]


def test_a_whole_but_unnamed_part_is_not_picked_up(store: CheckpointStore, folder: Path) -> None:
    (path,) = saved(store, 5)
    path.rename(folder / ".step_5.part")
    assert newest_of(store) == (None, [])


def tear(path: Path) -> None:
    file = path / "policy" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def flip(path: Path) -> None:
    file = path / "policy" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[333] ^= 1
    file.write_bytes(content)


def list_a_file_outside(path: Path) -> None:
    (path.parent / "outside").write_bytes(b"")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../outside"] = {"size_bytes": 0, "crc32c": 0}
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    "torn": (tear, "model.safetensors is torn: 700 bytes were written, 699 are there"),
    "flipped": (flip, "model.safetensors is damaged: its checksum is not the one in the manifest"),
    "file lost": (lambda path: (path / "learner.json").unlink(), "lacks learner.json, which its manifest lists"),
    "manifest lost": (lambda path: (path / "manifest.json").unlink(), "has no readable manifest.json"),
    "manifest torn": (lambda path: os.truncate(path / "manifest.json", 40), "has no readable manifest.json"),
    "manifest of another kind": (lambda path: (path / "manifest.json").write_text("[]"), "no readable manifest.json"),
    "file outside": (list_a_file_outside, "lacks ../outside"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_one_is_passed_over_and_said(store: CheckpointStore, folder: Path, name: str) -> None:
    damage, says = DAMAGES[name]
    _, newer = saved(store, 10, 20)
    damage(newer)
    with pytest.raises(CheckpointError):
        verify_checkpoint(newer)
    found, (complaint,) = newest_of(store)
    assert found == "step_10"
    assert says in complaint
    assert newest_of(store) == ("step_10", [])
    assert (folder / "broken_step_20").is_dir()


def test_a_damaged_one_does_not_count_among_the_kept(folder: Path) -> None:
    store = CheckpointStore(folder, keep=1)
    (path,) = saved(store, 20)
    tear(path)
    assert newest_of(store)[0] is None
    saved(store, 5)  # training began anew
    assert store.steps() == [5]
    assert newest_of(store) == ("step_5", [])
    saved(store, 20)
    assert newest_of(store) == ("step_20", [])


def test_all_damaged_gives_none(store: CheckpointStore) -> None:
    for path in saved(store, 1, 2):
        tear(path)
    found, complaints = newest_of(store)
    assert found is None
    assert len(complaints) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"steps": 3}', "null"])
def test_a_state_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "trainer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer\.json is not readable"):
        read_trainer_state(tmp_path)


def test_checksum_is_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "check").write_bytes(b"123456789")
    assert file_crc32c(tmp_path / "check") == 0xE3069283  # the check value of CRC-32C


def test_durable_writes_replace_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_durably(file, b"a longer content")
    write_durably(file, b"short")
    assert file.read_bytes() == b"short"
    assert list(tmp_path.iterdir()) == [file]
