"""`rl-rollout cache ls`, and errors shared by all commands."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from skip_command import FIRST, SECOND, THIRD, as_json, break_torn, entry_of, fill, forge, run, tree_bytes
from skip_groups import make_groups

from rl_rollout.cli import main
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.skip import EntryKey

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\ud800"
VERBS = [["ls"], ["verify"], ["prune", "--broken"]]


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path) -> str:
    return str(tmp_path / "cache") if request.param == "local" else f"memory://{uuid4().hex}/cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


def test_ls_lists_entries_with_their_sizes_and_policies(capsys, directory):
    fill(directory)
    status, out, _ = run(capsys, "ls", directory)
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("train-")}
    assert (status, list(rows)) == (0, [FIRST, SECOND, THIRD])
    assert "2abcdef01234" in rows[SECOND]
    assert "18 trajectories" in out


def test_ls_json_has_every_fact(capsys, directory):
    store = fill(directory, (1,))
    _, listing = as_json(capsys, "ls", directory)
    manifest = store.describe(EntryKey(step=1))
    assert listing.keys() == {"directory", "entries", "set_aside", "leftovers", "num_broken", "totals", "size_bytes"}
    (entry,) = listing["entries"]
    assert (entry.pop("made_at")[:2], entry.pop("size_bytes")) == ("20", listing["size_bytes"])
    assert entry == {
        "name": FIRST,
        "key": {"step": 1, "kind": "train", "part": 0},
        "generate_s": 12.25,
        "counts": listing["totals"],
        "fingerprint": manifest.fingerprint,
        "fault": None,
    }
    assert listing["totals"] == msgspec.to_builtins(manifest.counts)


def test_ls_sizes_are_those_of_all_files(capsys, folder):
    store = fill(folder)
    store.folder.set_aside(SECOND)
    (folder / ".writing-0000").write_bytes(b"12345")
    _, listing = as_json(capsys, "ls", folder)
    assert listing["size_bytes"] == tree_bytes(folder)
    assert listing["entries"][0]["size_bytes"] == entry_of(folder, FIRST).stat().st_size
    assert [each["name"].rpartition("-")[0] for each in listing["set_aside"]] == [SECOND]
    assert listing["leftovers"] == [{"name": ".writing-0000", "size_bytes": 5}]
    _, out, _ = run(capsys, "ls", folder)
    assert ".writing-0000" in out


def test_ls_sorts_by_kind_step_and_part(capsys, folder):
    store = fill(folder, (10, 2))
    fill(folder, (1,), kind="validation")
    store.write(EntryKey(step=2, part=1), make_groups(), fingerprint={}, generate_s=0.0)
    _, listing = as_json(capsys, "ls", folder)
    assert [entry["name"] for entry in listing["entries"]] == [
        "train-00000002-0000",
        "train-00000002-0001",
        "train-00000010-0000",
        "validation-00000001-0000",
    ]


def put_link(entry: Path) -> None:
    entry.unlink()
    entry.symlink_to("/etc/passwd")


def put_folder(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda entry: break_torn(entry.parent, SECOND), "it is not a zip that this package wrote"),
        (lambda entry: entry.write_bytes(b""), "it is not a zip that this package wrote"),
        (lambda entry: forge(entry.parent, SECOND, format="1"), "its format must be a number; found '1'"),
        (lambda entry: forge(entry.parent, SECOND, created_at=-1), "its description is not one of rollouts"),
        (put_link, "it must be a regular file; it is a link"),
        (put_folder, "it must be a regular file; it is a link, a folder"),
    ],
)
def test_ls_lists_a_broken_entry_with_its_reason_and_goes_on(capsys, folder, damage, reason):
    fill(folder)
    damage(entry_of(folder, SECOND))
    status, out, _ = run(capsys, "ls", folder)
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("train-")}
    assert (status, list(rows)) == (0, [FIRST, SECOND, THIRD])
    assert ["BROKEN" in line for line in rows.values()] == [False, True, False]
    assert reason in out
    assert str(entry_of(folder, SECOND)) in out
    _, listing = as_json(capsys, "ls", folder)
    assert (listing["num_broken"], listing["totals"]["groups"]) == (1, 4)
    fault = listing["entries"][1]["fault"]
    assert (fault["path"].startswith(str(entry_of(folder, SECOND))), fault["is_broken"]) == (True, True)
    assert reason in fault["reason"]


def test_numbers_that_nobody_measured_stop_nothing(capsys, folder):
    fill(folder)
    forge(folder, FIRST, created_at=1e300, generate_s=1e300)
    forge(folder, SECOND, created_at=float("nan"), generate_s=float("inf"))
    forge(
        folder,
        THIRD,
        created_at=253_402_300_799.9,
        generate_s=1e8,
        fingerprint={"policy": {"weights": 10**300}, "seed": 1e999},
    )
    fill(folder, (4,))
    status, listing = as_json(capsys, "ls", folder)
    assert status == 0
    assert [entry["fault"] is None for entry in listing["entries"]] == [False, False, True, True]
    assert listing["entries"][2]["made_at"] == "9999-12-31T23:59:59Z"
    assert listing["entries"][2]["fingerprint"]["seed"] is None
    assert run(capsys, "ls", folder)[0] == 0
    assert run(capsys, "prune", folder, "--max-bytes", "1T")[0] == 0


def test_a_deep_fingerprint_stops_nothing(capsys, folder):
    fill(folder, (1,))
    deep = 1
    for _ in range(200):
        deep = {"a": deep}
    forge(folder, FIRST, fingerprint={"policy": deep})
    assert run(capsys, "ls", folder)[0] == 0
    assert as_json(capsys, "ls", folder)[1]["num_broken"] == 0


def test_nothing_in_an_entry_reaches_the_terminal_as_it_is(capsys, folder):
    (group,) = make_groups(1, 2)
    failed = SessionResult(trajectories=(), failure=HOSTILE)
    prompt = replace(group.prompt, uid=HOSTILE, data_source=HOSTILE, columns={HOSTILE: HOSTILE})
    rows = tuple(replace(row, prompt_uid=HOSTILE) for row in group.sessions[0].trajectories)
    hostile = replace(group, prompt=prompt, sessions=(SessionResult(trajectories=rows), failed))
    fill(folder, (1,), groups=[hostile])
    fill(folder, (2, 3))
    forge(folder, FIRST, fingerprint={"policy": {"origin": HOSTILE}, HOSTILE: {HOSTILE: [HOSTILE]}})
    forge(folder, SECOND, **{HOSTILE: HOSTILE})
    (folder / "broken").mkdir()
    for place in (folder, folder / "broken"):
        (place / f"{HOSTILE[:-1]}.zarr.zip").write_bytes(b"")
        Path(os.fsdecode(os.fsencode(place) + b"/.writing-\xff\x1b[2J")).write_bytes(b"")
    for verb in (["ls"], ["verify"], ["prune", "--broken", "--dry-run"]):
        run(capsys, verb[0], folder, *verb[1:])
        run(capsys, verb[0], folder, *verb[1:], "--json")
    run(capsys, "verify", folder, HOSTILE)
    run(capsys, "ls", HOSTILE[:-1])


@pytest.mark.parametrize("verb", VERBS)
def test_a_directory_that_is_not_there_is_refused(capsys, tmp_path, verb):
    for directory in (tmp_path / "none", f"memory://{uuid4().hex}/none"):
        status, out, err = run(capsys, verb[0], directory, *verb[1:])
        assert (status, out) == (2, "")
        assert str(directory) in err


@pytest.mark.parametrize("verb", VERBS)
def test_a_directory_with_entries_of_an_earlier_format_is_refused(capsys, folder, verb):
    fill(folder, (1,))
    (folder / SECOND).mkdir()
    status, out, err = run(capsys, verb[0], folder, *verb[1:])
    assert (status, out, "format 1" in err, SECOND in err) == (2, "", True, True)


def test_a_directory_without_entries_says_so(capsys, folder):
    folder.mkdir()
    status, out, _ = run(capsys, "ls", folder)
    assert (status, "0 entries" in out) == (0, True)
    status, listing = as_json(capsys, "ls", folder)
    assert (status, listing["entries"], listing["totals"]["groups"], listing["size_bytes"]) == (0, [], 0, 0)
    assert run(capsys, "prune", folder, "--max-bytes", "1M")[0] == 0
    assert run(capsys, "verify", folder)[0] == 2


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_is_no_directory(capsys, folder, verb):
    fill(folder, (1,))
    (folder / "file").touch()
    for path in (folder / "file", entry_of(folder, FIRST)):
        status, out, err = run(capsys, verb[0], path, *verb[1:])
        assert (status, out, str(path) in err, f"{FIRST}.zarr.zip" in err) == (2, "", True, True)


def test_a_path_of_an_entry_is_not_taken_for_one_of_this_directory(capsys, folder):
    fill(folder)
    fill(folder.parent / "other")
    for verb in ("verify", "prune"):
        assert run(capsys, verb, folder, entry_of(folder.parent / "other", FIRST))[0] == 2
    assert len(list(folder.iterdir())) == 3


def test_an_entry_that_is_not_there_is_named_with_those_that_are(capsys, folder):
    fill(folder, (1, 2))
    for name in ("9", "train-9", "-", "\u0661"):
        for verb in ("verify", "prune"):
            status, _, err = run(capsys, verb, folder, name)
            assert (status, FIRST in err, SECOND in err) == (2, True, True)


def test_a_step_with_several_entries_is_asked_about(capsys, folder):
    fill(folder, (1, 2))
    fill(folder, (1,), kind="validation")
    status, _, err = run(capsys, "verify", folder, 1)
    assert (status, FIRST in err, "validation-00000001-0000" in err, SECOND in err) == (2, True, True, False)


def test_prune_without_a_wish_is_refused(capsys, folder):
    fill(folder)
    status, _, err = run(capsys, "prune", folder)
    assert (status, "--max-bytes" in err, "--broken" in err) == (2, True, True)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("package", ["zarr", "fsspec"])
def test_without_the_library_the_extra_is_named(capsys, folder, monkeypatch, verb, package):
    fill(folder)
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = run(capsys, verb[0], folder, *verb[1:])
    assert (status, "rl-rollout[skip]" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["cache"]),
        (["cache"], ["ls", "verify", "prune", "1 if something is broken"]),
        *((["cache", verb[0]], [f"rl-rollout cache {verb[0]} ", "--json"]) for verb in VERBS),
    ],
)
def test_help_has_examples_and_exit_statuses(capsys, arguments, words):
    with pytest.raises(SystemExit) as raised:
        main([*arguments, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert raised.value.code == 0
    assert words
    assert all(word in out for word in words)


def test_the_module_is_the_command_and_a_reader_that_goes_away_is_no_error(folder):
    fill(folder)
    command = f"{sys.executable} -m rl_rollout cache ls {folder} | head -c 5; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "entry", "")
