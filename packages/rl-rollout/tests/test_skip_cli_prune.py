"""`rl-rollout cache verify` and `prune`."""

import sys
from pathlib import Path
from uuid import uuid4

import pytest
from flat_store import FlatStore
from skip_command import FIRST, SECOND, THIRD, as_json, break_chunk, break_torn, entry_of, fill, run, tree, tree_bytes

from rl_rollout.cli import main
from rl_rollout.skip.options import parse_bytes


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path) -> str:
    return str(tmp_path / "cache") if request.param == "local" else f"memory://{uuid4().hex}/cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


def test_verify_reads_every_byte_and_changes_nothing(capsys, folder):
    fill(folder)
    status, out, _ = run(capsys, "verify", folder)
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()[:3]] == [["ok", FIRST], ["ok", SECOND], ["ok", THIRD]]
    break_chunk(folder, SECOND)
    before = tree(folder)
    status, out, _ = run(capsys, "verify", folder)
    assert (status, "BROKEN" in out, str(entry_of(folder, SECOND)) in out) == (1, True, True)
    status, found = as_json(capsys, "verify", folder)
    assert (status, found.keys()) == (1, {"directory", "entries", "num_broken"})
    assert found["num_broken"] == 1
    assert [entry["name"] for entry in found["entries"]] == [FIRST, SECOND, THIRD]
    assert [entry["fault"] is None for entry in found["entries"]] == [True, False, True]
    assert run(capsys, "verify", folder, 1, THIRD)[0] == 0
    assert run(capsys, "verify", folder, SECOND)[0] == 1
    assert tree(folder) == before


def test_verify_shows_its_progress_on_a_terminal_alone(capsys, folder, monkeypatch):
    fill(folder)
    assert run(capsys, "verify", folder)[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["cache", "verify", str(folder)])
    assert "read 2 of 3 entries" in capsys.readouterr().err


def test_prune_removes_the_oldest_until_the_rest_fits(capsys, directory):
    store = fill(directory, (2, 3, 1))
    _, listing = as_json(capsys, "ls", directory)
    sizes = {entry["name"]: entry["size_bytes"] for entry in listing["entries"]}
    room = sizes[FIRST] + sizes[THIRD]
    status, out, _ = run(capsys, "prune", directory, "--max-bytes", room, "--dry-run")
    assert (status, SECOND in out, FIRST in out, len(store.entries())) == (0, True, False, 3)
    status, pruned = as_json(capsys, "prune", directory, "--max-bytes", room)
    assert status == 0
    assert pruned["removed"] == [{"name": SECOND, "size_bytes": sizes[SECOND], "why": "oldest"}]
    assert (pruned["kept_entries"], pruned["kept_bytes"], pruned["is_dry_run"]) == (2, room, False)
    assert [key.step for key in store.entries()] == [1, 3]
    assert as_json(capsys, "prune", directory, "--max-bytes", room)[1]["removed"] == []


def test_prune_broken_removes_what_is_broken_set_aside_or_left(capsys, folder):
    store = fill(folder)
    store.folder.set_aside(FIRST)
    break_torn(folder, SECOND)
    (folder / ".writing-dead").write_bytes(b"123")
    with store.folder._new_file("alive") as (_, alive):
        before = tree(folder)
        status, planned = as_json(capsys, "prune", folder, "--broken", "--dry-run")
        assert (status, tree(folder) == before) == (0, True)
        assert [(each["name"].partition("-")[0], each["why"]) for each in planned["removed"]] == [
            (".writing", "left by a writer that died"),
            ("broken/train", "set aside"),
            ("train", "broken"),
        ]
        _, done = as_json(capsys, "prune", folder, "--broken")
        assert done == {**planned, "is_dry_run": False}
        left = [Path(alive).name, "broken", entry_of(folder, THIRD).name]
        assert sorted(path.name for path in folder.iterdir()) == left
        assert list((folder / "broken").iterdir()) == []
        assert tree_bytes(folder) == done["kept_bytes"]


def test_prune_broken_reads_every_entry_completely(capsys, folder, monkeypatch):
    fill(folder, (1, 2, 3, 4))
    break_chunk(folder, THIRD)
    broken = {"name": THIRD, "size_bytes": entry_of(folder, THIRD).stat().st_size, "why": "broken"}
    room = tree_bytes(folder) - broken["size_bytes"]
    for wishes in (["--broken"], ["--broken", "--max-bytes", room]):  # the other entries fit
        status, planned = as_json(capsys, "prune", folder, *wishes, "--dry-run")
        assert (status, planned["removed"], planned["kept_bytes"]) == (0, [broken], room)
    oldest = {"name": FIRST, "size_bytes": entry_of(folder, FIRST).stat().st_size, "why": "oldest"}
    _, planned = as_json(capsys, "prune", folder, "--broken", "--max-bytes", room - 1, "--dry-run")
    assert planned["removed"] == [broken, oldest]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["cache", "prune", str(folder), "--broken", "--json"])
    assert "read 3 of 4 entries" in capsys.readouterr().err
    monkeypatch.undo()
    names = [FIRST, SECOND, "train-00000004-0000"]
    assert sorted(folder.iterdir()) == [entry_of(folder, name) for name in names]
    assert run(capsys, "verify", folder)[0] == 0


def test_prune_broken_removes_a_link_or_folder_in_the_place_of_an_entry(capsys, folder):
    fill(folder)
    outside = folder.with_name("outside")
    entry_of(folder, FIRST).rename(outside)
    entry_of(folder, FIRST).symlink_to(outside)
    entry_of(folder, SECOND).unlink()
    (entry_of(folder, SECOND) / "sub").mkdir(parents=True)
    _, done = as_json(capsys, "prune", folder, "--broken")
    assert [each["name"] for each in done["removed"]] == [FIRST, SECOND]
    assert sorted(folder.iterdir()) == [entry_of(folder, THIRD)]
    assert outside.exists()


def test_prune_for_room_says_which_were_broken(capsys, folder):
    fill(folder)
    break_torn(folder, SECOND)
    for dry in (["--dry-run"], []):
        _, found = as_json(capsys, "prune", folder, "--max-bytes", entry_of(folder, THIRD).stat().st_size, *dry)
        assert [(each["name"], each["why"]) for each in found["removed"]] == [(SECOND, "broken"), (FIRST, "oldest")]


def test_prune_removes_entries_by_name_or_step(capsys, directory):
    store = fill(directory)
    _, planned = as_json(capsys, "prune", directory, 1, THIRD, FIRST, "--dry-run")
    assert [(each["name"], each["why"]) for each in planned["removed"]] == [(FIRST, "named"), (THIRD, "named")]
    assert len(store.entries()) == 3
    assert run(capsys, "prune", directory, 1, 9)[0] == 2
    assert len(store.entries()) == 3
    _, done = as_json(capsys, "prune", directory, 1, THIRD)
    assert done == {**planned, "is_dry_run": False}
    assert [key.name for key in store.entries()] == [SECOND]


def test_room_is_made_of_what_is_not_named(capsys, folder):
    fill(folder)
    room = entry_of(folder, FIRST).stat().st_size + entry_of(folder, SECOND).stat().st_size
    for dry in (["--dry-run"], []):
        _, found = as_json(capsys, "prune", folder, 3, "--max-bytes", room, *dry)
        assert [(each["name"], each["why"]) for each in found["removed"]] == [(THIRD, "named")]
        assert found["kept_bytes"] == room


def test_what_the_store_cannot_give_is_unreadable_and_stays(capsys):
    FlatStore.reset()
    store = fill("flat://bucket/cache", (1, 2))
    FlatStore.failing["cat_file"] = PermissionError("denied")
    status, out, _ = run(capsys, "ls", "flat://bucket/cache")
    assert (status, "UNREADABLE" in out, "denied" in out) == (0, True, True)
    status, found = as_json(capsys, "verify", "flat://bucket/cache")
    assert (status, [entry["fault"]["is_broken"] for entry in found["entries"]]) == (1, [False, False])
    assert as_json(capsys, "prune", "flat://bucket/cache", "--broken")[1]["removed"] == []
    FlatStore.failing.clear()
    assert run(capsys, "verify", "flat://bucket/cache")[0] == 0
    FlatStore.reset()
    assert store.entries() == []


def test_a_dry_run_plans_what_is_then_done(capsys, folder):
    store = fill(folder, (1, 2, 3, 4))
    store.folder.set_aside(SECOND)
    break_torn(folder, FIRST)
    room = entry_of(folder, "train-00000004-0000").stat().st_size
    arguments = ["prune", folder, "--broken", "--max-bytes", room]
    _, planned = as_json(capsys, *arguments, "--dry-run")
    _, done = as_json(capsys, *arguments)
    assert planned["removed"] == done["removed"]
    assert len(done["removed"]) == 3
    assert planned["kept_bytes"] == done["kept_bytes"] == tree_bytes(folder)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("500000", 500_000),
        ("1k", 1000),
        ("500M", 500_000_000),
        ("1.5GB", 1_500_000_000),
        ("20Gi", 20 * 1024**3),
        ("2 tib", 2 * 1024**4),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "many", "1e9", "5X", "k", "1.2.3", "9" * 40, "inf", "\u0661"])
def test_what_is_no_size_is_refused(capsys, folder, text):
    with pytest.raises(SystemExit) as raised:
        main(["cache", "prune", str(folder), f"--max-bytes={text}"])
    assert raised.value.code == 2
    assert "expected a size such as 500000, 500M, 1.5GB or 20Gi" in capsys.readouterr().err
