"""`rl-rollout cache ls`, and errors shared by all commands."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from rl_rollout.skip.manifest import decode_manifest
from skip_command import FIRST, SECOND, THIRD, as_json, break_torn, fill, forge, run, tree_bytes
from skip_groups import make_groups

from rl_rollout.cli import main
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.skip import EntryKey


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path) -> str:
    return str(tmp_path / "cache") if request.param == "local" else f"memory://{uuid4().hex}/cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\ud800"


def test_ls_is_a_table_with_totals(capsys, directory):
    fill(directory)
    status, out, _ = run(capsys, "ls", directory)
    lines = out.splitlines()
    assert status == 0
    assert re.split(r" {2,}", lines[0]) == [
        *("entry", "made at (UTC)", "groups", "sessions", "failed", "trajectories", "tokens", "size", "generated in"),
        *("policy", "state"),
    ]
    cells = re.split(r" {2,}", lines[2])
    told = [cells[i] for i in (0, 2, 3, 4, 5, 8, 9, 10)]
    assert told == [SECOND, "2", "6", "0", "6", "24.5 s", "2abcdef01234", "complete"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", cells[1])
    assert len(lines) == 7
    assert lines[6] == "complete: manifest and sizes fit; `rl-rollout cache verify DIR` checks every byte"
    assert lines[5].startswith("3 entries: 6 groups, 18 sessions (0 failed), 18 trajectories, ")


def test_ls_json_has_every_fact(capsys, directory):
    store = fill(directory, (1,))
    _, listing = as_json(capsys, "ls", directory)
    manifest = store.manifest(EntryKey(step=1))
    (entry,) = listing["entries"]
    assert entry["name"] == FIRST
    assert entry["key"] == {"step": 1, "kind": "train", "part": 0}
    assert entry["fingerprint"] == manifest.fingerprint
    assert entry["counts"] == msgspec.to_builtins(manifest.counts) == listing["totals"]
    assert entry["size_bytes"] == listing["size_bytes"] > manifest.size_bytes
    assert entry["generate_s"] == 12.25


def test_ls_sizes_are_those_of_all_files(capsys, folder):
    store = fill(folder)
    store.folder.set_aside(SECOND)
    (folder / ".removing-0000").mkdir()
    (folder / ".removing-0000" / "left").write_bytes(b"12345")
    _, listing = as_json(capsys, "ls", folder)
    assert listing["size_bytes"] == tree_bytes(folder)
    assert listing["entries"][0]["size_bytes"] == tree_bytes(folder / FIRST)
    assert [each["name"].rpartition("-")[0] for each in listing["set_aside"]] == [SECOND]
    assert listing["leftovers"] == [{"name": ".removing-0000", "size_bytes": 5}]
    _, out, _ = run(capsys, "ls", folder)
    assert "set aside in broken/: 1, " in out
    assert "left by writers that died: 1, 5 B\n  .removing-0000  5 B\n" in out


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


def break_missing(entry: Path) -> None:
    next(entry.glob("arrays-*/records/c/0")).unlink()


def break_link(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to("/etc")


def break_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_bytes(b"no folder")


def break_counts(entry: Path) -> None:
    manifest = decode_manifest((entry / "manifest.json").read_bytes(), path="")
    forge(entry.parent, entry.name, counts=msgspec.structs.replace(manifest.counts, tokens=10**400))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_torn, "manifest.json: it is not a manifest"),
        (lambda entry: (entry / "manifest.json").unlink(), "manifest.json: it is missing"),
        (break_missing, "records/c/0: it must have"),
        (break_link, "it is a link or not a folder"),
        (break_file, "it is a link or not a folder"),
        (break_counts, "manifest.json: it is not a manifest"),
    ],
)
def test_ls_lists_a_broken_entry_with_its_reason_and_goes_on(capsys, folder, damage, reason):
    fill(folder)
    damage(folder / SECOND)
    status, out, _ = run(capsys, "ls", folder)
    states = {line.split()[0]: line.split()[-1] for line in out.splitlines()[1:4]}
    assert (status, states) == (0, {FIRST: "complete", SECOND: "BROKEN", THIRD: "complete"})
    (fault,) = (line for line in out.splitlines() if line.startswith(f"BROKEN {SECOND}: "))
    assert reason in fault
    assert str(folder / SECOND) in fault
    assert "2 entries, 1 broken: 4 groups" in out
    _, listing = as_json(capsys, "ls", folder)
    assert listing["num_broken"] == 1
    assert listing["entries"][1]["fault"]["path"].startswith(str(folder / SECOND))


def test_numbers_that_nobody_measured_stop_nothing(capsys, folder):
    fill(folder)
    forge(folder, FIRST, created_at=1e300, generate_s=1e300)
    forge(folder, SECOND, created_at=float("nan"), generate_s=float("inf"))
    forge(folder, THIRD, created_at=9e11, generate_s=1e8, fingerprint={"policy": {"weights": 10**300}, "seed": 1e999})
    fill(folder, (4,))
    status, out, _ = run(capsys, "ls", folder)
    assert status == 0
    assert [line.split()[-1] for line in out.splitlines()[1:5]] == ["BROKEN", "BROKEN", "complete", "complete"]
    status, listing = as_json(capsys, "ls", folder)
    assert status == 0
    assert listing["entries"][2]["made_at"] is None
    assert listing["entries"][2]["fingerprint"]["seed"] is None
    for step in (1, 2, 3, 4):
        assert run(capsys, "show", folder, step)[0] == (1 if step < 3 else 0)
    assert run(capsys, "show", folder)[0] == 0
    assert run(capsys, "prune", folder, "--max-bytes", "1T")[0] == 0


def test_nothing_in_an_entry_reaches_the_terminal_as_it_is(capsys, folder):
    (group,) = make_groups(1, 2)
    failed = SessionResult(trajectories=(), failure=HOSTILE)
    text = f"{HOSTILE}\nline\ttwo"
    prompt = replace(
        group.prompt,
        uid=HOSTILE,
        data_source=HOSTILE,
        messages=({"role": HOSTILE, "content": text, HOSTILE: [HOSTILE]}, {"content": [HOSTILE]}),
        ground_truth=HOSTILE,
        columns={HOSTILE: HOSTILE},
    )
    rows = tuple(
        replace(row, prompt_uid=HOSTILE, extras={HOSTILE: HOSTILE}, reward_components={HOSTILE: 1.0})
        for row in group.sessions[0].trajectories
    )
    hostile = replace(group, prompt=prompt, sessions=(SessionResult(trajectories=rows), failed))
    fill(folder, (1,), groups=[hostile])
    fill(folder, (2,))
    forge(folder, FIRST, fingerprint={"policy": {"origin": HOSTILE}, HOSTILE: {HOSTILE: [HOSTILE]}})
    (folder / "broken").mkdir()
    (folder / "broken" / HOSTILE[:-1]).mkdir()
    (folder / SECOND / HOSTILE[:9]).symlink_to("/etc")
    for verb in (["ls"], ["show"], ["verify"], ["prune", "--broken", "--dry-run"]):
        run(capsys, verb[0], folder, *verb[1:])
        run(capsys, verb[0], folder, *verb[1:], "--json")
    _, out, _ = run(capsys, "show", folder, 1)
    assert "\\x1b]0;owned\\x07" in out
    assert "    | line    two" in out
    run(capsys, "show", folder, HOSTILE)
    run(capsys, "ls", HOSTILE[:-1])


VERBS = [["ls"], ["show"], ["verify"], ["prune", "--broken"]]


@pytest.mark.parametrize("verb", VERBS)
def test_a_directory_that_is_not_there_is_refused(capsys, tmp_path, verb):
    for directory in (tmp_path / "none", f"memory://{uuid4().hex}/none"):
        status, out, err = run(capsys, verb[0], directory, *verb[1:])
        assert (status, out) == (2, "")
        assert f"{directory} must be the folder or URL of a skip cache" in err
        assert "Give the rollout_cache.directory of the run." in err


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_is_no_directory(capsys, tmp_path, verb):
    path = tmp_path / "file"
    path.write_bytes(b"")
    status, _, err = run(capsys, verb[0], path, *verb[1:])
    assert (status, err) == (2, f"rl-rollout: {path} must be a readable folder: Not a directory.\n")


def test_a_directory_without_entries_says_so(capsys, folder):
    folder.mkdir()
    assert run(capsys, "ls", folder)[:2] == (
        0,
        f"no entries in {folder}; expected folders such as {FIRST} with a manifest.json.\n",
    )
    status, listing = as_json(capsys, "ls", folder)
    assert (status, listing["entries"], listing["totals"]["groups"], listing["size_bytes"]) == (0, [], 0, 0)
    assert run(capsys, "prune", folder, "--max-bytes", "1M")[0] == 0
    for verb in VERBS[1:3]:
        status, _, err = run(capsys, verb[0], folder, *verb[1:])
        assert (status, f"{folder} has no entries; expected folders such as {FIRST}" in err) == (2, True)


def test_an_entrys_own_folder_is_pointed_upwards(capsys, folder):
    fill(folder)
    status, _, err = run(capsys, "verify", folder / FIRST)
    assert (status, "The directory is itself an entry: give its parent folder." in err) == (2, True)
    status, out, _ = run(capsys, "ls", folder / FIRST)
    assert (status, out.startswith(f"no entries in {folder / FIRST}; ")) == (0, True)
    assert "The directory is itself an entry: give its parent folder." in out


def test_an_entry_of_another_directory_is_not_taken_for_one_of_this(capsys, folder):
    fill(folder)
    fill(folder.parent / "other")
    for verb in ("show", "verify", "prune"):
        status, _, err = run(capsys, verb, folder, folder.parent / "other" / FIRST)
        assert (status, f"{folder} has no entry " in err) == (2, True)
    assert run(capsys, "verify", f"{folder}/", f"{folder.parent}/./{folder.name}/{FIRST}/")[0] == 0


def test_an_entry_that_is_not_there_is_named_with_those_that_are(capsys, folder):
    fill(folder, (1, 2))
    for name, what in (("9", "step 9"), ("train-9", "entry 'train-9'"), ("-", "entry '-'"), ("\u0661", "entry")):
        for verb in ("show", "verify"):
            status, _, err = run(capsys, verb, folder, name)
            assert status == 2
            assert f"{folder} has no {what}" in err
            assert f"It has 2: {FIRST}, {SECOND}." in err


def test_a_step_with_several_entries_is_asked_about(capsys, folder):
    fill(folder, (1, 2))
    fill(folder, (1,), kind="validation")
    status, _, err = run(capsys, "show", folder, 1)
    names = f"{FIRST}, validation-00000001-0000"
    assert (status, f"step 1 has 2 entries in {folder}: {names}. Name one of them." in err) == (2, True)


def test_prune_without_a_wish_is_refused(capsys, folder):
    fill(folder)
    status, _, err = run(capsys, "prune", folder)
    assert (status, "prune needs --max-bytes SIZE, --broken or an ENTRY" in err) == (2, True)


@pytest.mark.parametrize("verb", [["show"], ["verify"], ["prune", "--broken"]])
def test_without_zarr_the_extra_is_named(capsys, folder, monkeypatch, verb):
    fill(folder)
    monkeypatch.setitem(sys.modules, "numcodecs.blosc", None)
    status, _, err = run(capsys, verb[0], folder, *verb[1:])
    assert (status, err) == (
        2,
        "rl-rollout: skip caches need zarr's codecs. Install rl-rollout[skip] as the README says.\n",
    )
    assert run(capsys, "ls", folder)[0] == 0


def test_without_fsspec_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rl_rollout.skip.remote_folder", None)
    status, _, err = run(capsys, "ls", "s3://bucket/x")
    assert status == 2
    assert err == "rl-rollout: skip caches at a URL need fsspec. Install rl-rollout[skip] as the README says.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["cache", "skip caches"]),
        (["cache"], ["ls", "show", "verify", "prune", "Exit status: 0; 1 if something is broken"]),
        *(
            (["cache", verb[0]], ["examples:", f"rl-rollout cache {verb[0]} ", "Exit status", "s3://bucket/rollouts"])
            for verb in VERBS
        ),
    ],
)
def test_help_has_examples_and_exit_statuses(capsys, arguments, words):
    with pytest.raises(SystemExit) as raised:
        main([*arguments, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert raised.value.code == 0
    assert all(word in out for word in words)


def test_the_module_is_the_command_and_a_reader_that_goes_away_is_no_error(folder):
    fill(folder)
    command = f"{sys.executable} -m rl_rollout cache ls {folder} | head -c 5; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "entry", "")
