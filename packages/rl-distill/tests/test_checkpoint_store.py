"""Checkpoints survive a crash at any point, and a damaged one is never loaded."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rl_core.errors import CheckpointError, DeadlineError, SettingsError
from rl_core.files.durable import write_durably
from rl_distill.background import saved_together
from rl_distill.checkpoints.store import CheckpointStore, Saved, file_crc32c, read_state, verify_checkpoint

KILLER = Path(__file__).parent / "checkpoint_killer.py"


class Pending:
    """A save that completes or fails once the test sets `free`."""

    def __init__(self, finish: Callable[[], None] = lambda: None, *, is_free: bool = True) -> None:
        self.free = threading.Event()
        self.has_begun = threading.Event()
        self._finish = finish
        if is_free:
            self.free.set()

    def wait(self) -> None:
        self.has_begun.set()
        assert self.free.wait(30)
        self._finish()


def write_learner(folder: Path) -> Pending:
    (folder / "policy").mkdir()
    (folder / "policy" / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "learner.json").write_text("{}")
    return Pending()


def cut_short(folder: Path) -> Pending:
    (folder / "half").write_bytes(b"half")
    raise KeyboardInterrupt


def disk_full() -> None:
    raise OSError(28, "No space left on device")


def saved(store: CheckpointStore, *steps: int) -> list[Path]:
    for step in steps:
        store.begin(step, {"step": step}, write_learner)
        store.wait()
    return [store_folder(store) / f"step_{step}" for step in steps]


def store_folder(store: CheckpointStore) -> Path:
    return store._directory


def newest_of(store: CheckpointStore) -> tuple[str | None, list[str]]:
    """Return the name of the newest complete checkpoint, and the complaints about others."""
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


def test_the_state_comes_back_as_it_was(store: CheckpointStore, folder: Path) -> None:
    state = {"step": 7, "seconds": 0.1 + 0.2, "results": {"accuracy": 1 / 3, "seen": [1, None, True, "é"]}}
    store.begin(7, state, write_learner)
    state["step"] = 8  # later changes are not saved
    store.wait()
    assert read_state(folder / "step_7") == {**state, "step": 7}


def test_a_state_that_is_no_json_is_refused_before_anything_is_written(store: CheckpointStore, folder: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.begin(1, {"step": object()}, write_learner)
    assert not folder.exists()


def test_nothing_is_kept_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="at least 1"):
        CheckpointStore(folder, keep=0)


def test_the_newest_are_kept_by_number(store: CheckpointStore) -> None:
    saved(store, 2, 9, 10)
    assert store.steps() == [9, 10]
    assert newest_of(store) == ("step_10", [])


def test_saving_a_step_again_replaces_it(store: CheckpointStore, folder: Path) -> None:
    for attempt in (1, 2):
        store.begin(3, {"attempt": attempt}, write_learner)
    store.wait()
    assert read_state(folder / "step_3") == {"attempt": 2}
    assert [entry.name for entry in folder.iterdir()] == ["step_3"]


def test_a_crash_while_writing_leaves_the_older_one(store: CheckpointStore, folder: Path) -> None:
    saved(store, 1)
    with pytest.raises(KeyboardInterrupt):
        store.begin(2, {}, cut_short)
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


def change_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def make_a_pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


DAMAGES = {
    "manifest a pipe": (make_a_pipe, "must be a regular file"),
    "manifest of nothing": (lambda path: change_manifest(path, files={}), "has no trainer.json in its manifest"),
    "manifest with a list": (lambda path: change_manifest(path, files=[]), "manifest.json is damaged"),
    "manifest too deep": (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json is damaged"),
    "torn": (tear, "model.safetensors is torn: expected 700 bytes, found 699"),
    "flipped": (flip, "model.safetensors is damaged: its checksum differs from the one in the manifest"),
    "file lost": (lambda path: (path / "learner.json").unlink(), "lacks learner.json, which its manifest lists"),
    "manifest lost": (lambda path: (path / "manifest.json").unlink(), "manifest.json does not exist"),
    "manifest torn": (lambda path: os.truncate(path / "manifest.json", 40), "manifest.json is damaged"),
    "manifest of another kind": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_one_is_passed_over_and_said(store: CheckpointStore, folder: Path, name: str) -> None:
    damage, says = DAMAGES[name]
    _, newer = saved(store, 10, 20)
    damage(newer)
    with pytest.raises(CheckpointError, match=says):
        verify_checkpoint(newer)
    found, (complaint,) = newest_of(store)
    assert found == "step_10"
    assert says in complaint
    assert newest_of(store) == ("step_10", [])
    assert (folder / "broken_step_20").is_dir()


def test_one_of_another_format_is_left_as_it_is(store: CheckpointStore, folder: Path) -> None:
    change_manifest(saved(store, 1, 2)[1], format=2)
    with pytest.raises(CheckpointError, match=r"manifest of format 2; this release reads 1\. Use the release"):
        store.newest(pytest.fail)
    assert store.steps() == [1, 2]


def test_it_is_written_while_training_goes_on(folder: Path) -> None:
    told: list[Saved] = []
    store = CheckpointStore(folder, keep=2, on_saved=told.append)
    saved(store, 1)
    pending = Pending(is_free=False)
    store.begin(2, {"step": 2}, lambda aside: write_learner(aside) and pending)
    assert pending.has_begun.wait(30)
    assert store.steps() == [1]
    assert [event.step for event in told] == [1]
    with pytest.raises(DeadlineError, match=r"checkpoint of step 2 is still being written after 0\.01 s"):
        store.wait(0.01)

    pending.free.set()
    store.wait()

    assert store.steps() == [1, 2]
    assert [(event.step, event.folder) for event in told] == [(1, folder / "step_1"), (2, folder / "step_2")]
    assert all(event.took_s > 0 for event in told)
    verify_checkpoint(folder / "step_2")


def test_one_at_a_time_is_written(store: CheckpointStore) -> None:
    pending, order = Pending(lambda: order.append("first is whole"), is_free=False), []

    def second(aside: Path) -> Pending:
        order.append("second begins")
        return write_learner(aside)

    store.begin(1, {}, lambda aside: write_learner(aside) and pending)
    begins = threading.Thread(target=lambda: store.begin(2, {}, second))
    begins.start()
    assert pending.has_begun.wait(30)
    pending.free.set()
    begins.join(30)
    store.wait()
    assert order == ["first is whole", "second begins"]
    assert store.steps() == [1, 2]


def test_looking_for_the_newest_waits_for_the_one_being_written(store: CheckpointStore) -> None:
    pending = Pending(is_free=False)
    store.begin(1, {}, lambda aside: write_learner(aside) and pending)
    found: list[str | None] = []
    looks = threading.Thread(target=lambda: found.append(newest_of(store)[0]))
    looks.start()
    assert pending.has_begun.wait(30)
    pending.free.set()
    looks.join(30)
    assert found == ["step_1"]


@pytest.mark.parametrize("surfaces_in", ["wait", "begin"])
def test_an_error_in_the_background_surfaces_once(store: CheckpointStore, folder: Path, surfaces_in: str) -> None:
    saved(store, 1)
    store.begin(2, {}, lambda aside: write_learner(aside) and Pending(disk_full))
    with pytest.raises(CheckpointError, match=r"could not be written into .*checkpoints: OSError: .*No space left"):
        store.wait() if surfaces_in == "wait" else store.begin(3, {}, write_learner)
    assert newest_of(store) == ("step_1", [])
    saved(store, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_3"]


def test_closing_waits_and_logs_what_went_wrong(store: CheckpointStore) -> None:
    store.begin(1, {}, write_learner)
    store.close()
    assert store.steps() == [1]
    store.begin(2, {}, lambda aside: write_learner(aside) and Pending(disk_full))
    with capture_logs() as logs:
        store.close()
        store.close()
    assert [(log["event"], "No space left" in log["error"]) for log in logs] == [("checkpoint_not_written", True)]
    assert store.steps() == [1]


def test_several_saves_are_one() -> None:
    ended: list[str] = []

    def fail() -> None:
        ended.append("second")
        raise OSError("torn")

    together = saved_together(
        Pending(lambda: ended.append("first")), Pending(fail), Pending(lambda: ended.append("third"))
    )
    with pytest.raises(OSError, match="torn"):
        together.wait()
    assert ended == ["first", "second", "third"]
    saved_together().wait()


@pytest.mark.parametrize("step", [3, 2], ids=["new", "replaced"])
def test_killed_anywhere_the_old_or_the_new_one_is_whole(tmp_path: Path, step: int) -> None:
    """SIGKILL before each file operation, in separate processes: see checkpoint_killer.py."""
    command = [sys.executable, KILLER, tmp_path, str(step)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    *killed, undisturbed = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(killed) > 20
    assert {row["killed"] for row in killed} == {True}
    assert {(row["newest"], row["attempt"]) for row in killed} == {(2, "first"), (step, "second")}
    assert undisturbed == {"killed": False, "newest": step, "attempt": "second", "kept": [step, 4]}
    assert {tuple(row["kept"]) for row in killed} <= {(2, 4), (3, 4)}  # leftovers are removed, and saving continues


def test_names_that_are_no_steps_are_passed_over(store: CheckpointStore, folder: Path) -> None:
    saved(store, 4)
    for name in ("step_", "step_x", "step_-1", "step_²", "step_07", "step_5.part", "other"):
        (folder / name).mkdir()
    assert store.steps() == [4]
    assert newest_of(store) == ("step_4", [])


def test_a_damaged_one_does_not_count_among_the_kept(folder: Path) -> None:
    store = CheckpointStore(folder, keep=1)
    (path,) = saved(store, 20)
    tear(path)
    assert newest_of(store)[0] is None
    saved(store, 5)  # training started over
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


@pytest.mark.parametrize("content", ["", "[]", "null", '{"step": 3', "[" * 100_000])
def test_a_state_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "trainer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer\.json must"):
        read_state(tmp_path)


def test_checksum_is_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "check").write_bytes(b"123456789")
    assert file_crc32c(tmp_path / "check") == 0xE3069283  # check value of CRC-32C


def test_durable_writes_replace_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_durably(file, b"a longer content")
    write_durably(file, b"short")
    assert file.read_bytes() == b"short"
    assert list(tmp_path.iterdir()) == [file]


def test_chosen_steps_are_kept_beside_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    for step, also_keep in ((1, []), (2, [1]), (3, [1]), (4, [3, 9]), (5, [])):
        store.begin(step, {"step": step}, write_learner, also_keep=also_keep)
        store.wait()
        assert store.steps() == sorted({step, *also_keep} - {9})
