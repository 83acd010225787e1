"""`rl-rollout cache` for its tests: caches to inspect, and a run of the command that checks its output."""

import json
import re
from pathlib import Path

import entry_forgery
from skip_groups import make_groups, make_prompts_of

from rl_core.files.array_entries import SUFFIX
from rl_rollout.cli import main
from rl_rollout.skip import EntryKey, EntryStore, RolloutOrigin
from rl_rollout.skip.fingerprint import make_fingerprint
from rl_rollout.skip.rows import TOKEN_DTYPES

FIRST, SECOND, THIRD = (f"train-0000000{step}-0000" for step in (1, 2, 3))
UNPRINTED = re.compile(r"[^\n -~\u00a1-\u2027\u2030-\u2fff\u4e00-\u9fff]")


def fill(directory: str | Path, steps=(1, 2, 3), *, groups=None, policy=None, kind: str = "train") -> EntryStore:
    store = EntryStore(str(directory))
    for step in steps:
        made = groups or make_groups(2, 3, seed=step)
        circumstances = RolloutOrigin(
            policy=policy or {"weights": f"{step}abcdef0123456789"},
            tokenizer={"vocabulary": "v"},
            sampling={"temperature": 0.5},
            group_size=3,
            loop={"name": "single_turn"},
        )
        fingerprint = make_fingerprint(circumstances, make_prompts_of(made), columns=TOKEN_DTYPES)
        store.write(EntryKey(step=step, kind=kind), made, fingerprint=fingerprint, generate_s=12.25 * step)
    return store


def entry_of(folder: Path, name: str) -> Path:
    return folder / f"{name}{SUFFIX}"


def forge(folder: Path, name: str, **fields) -> None:
    """Change an entry's description, with the right checksum."""
    forgery = entry_forgery.Forgery(entry_of(folder, name))
    forgery.describe(**fields)
    forgery.save()


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["cache", *map(str, arguments)])
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert UNPRINTED.search(text) is None, repr(text)
    return status, captured.out, captured.err


def as_json(capsys, *arguments: object):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    status, out, _ = run(capsys, *arguments, "--json")
    return status, json.loads(out, parse_constant=refuse)


def break_chunk(folder: Path, name: str) -> None:
    """Damage an array, but not the description."""
    entry_forgery.flip(entry_of(folder, name), "input_ids/c/0")


def break_torn(folder: Path, name: str) -> None:
    """Cut the end off an entry's file."""
    entry = entry_of(folder, name)
    entry.write_bytes(entry.read_bytes()[:-9])


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
