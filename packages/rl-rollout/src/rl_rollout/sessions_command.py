"""The command `rl-rollout sessions`: what a gateway has kept."""

import argparse
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.terminal_text import json_text, printable, table_lines, write_out

COLUMNS = ("session", "state", "prompt_uid", "session_index", "turns", "forks", "tokens", "reward", "failure")
FOUND = 1
EXAMPLES = """\
examples:
  rl-rollout sessions list sessions
  rl-rollout sessions export sessions --to rollouts.parquet --tokenizer models/Qwen3-0.6B

Exit status: 0; 1 where files of sessions cannot be read; 2 where the command cannot do what it is told."""
EXPORTED = """\
Writes a row for each trajectory of the finished sessions that have a reward. Its columns: session, prompt_uid,
session_index, output_index, parent, input_ids, loss_mask, rollout_logprobs, policy_versions, num_prompt_tokens,
finish_reason, reward, reward_components, metadata; with --tokenizer also the texts prompt and completion.
Sessions that failed are counted and left out. The file appears whole or not at all."""


def run_list(arguments: argparse.Namespace) -> int:
    """Show the sessions of a folder."""
    from rl_rollout.gateway.exports import list_sessions  # needs an extra

    found = list(list_sessions(_folder(arguments)))
    if arguments.json:
        write_out(json_text({"sessions": found}))
        return 0
    rows = [["" if one.get(name) is None else printable(str(one[name])) for name in COLUMNS] for one in found]
    right = ("session_index", "turns", "forks", "tokens", "reward")
    write_out("".join(f"{line}\n" for line in table_lines(COLUMNS, rows, right=right)))
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Write the trajectories of a folder's finished sessions."""
    from rl_rollout.gateway.exports import export_sessions  # needs an extra
    from rl_rollout.prompts.tokenizer import PromptTokenizer

    decode = None
    if arguments.tokenizer is not None:
        tokenizer = PromptTokenizer.load(arguments.tokenizer)
        decode = lambda rows: tokenizer.decode(rows, skip_special_tokens=False)
    done = export_sessions(_folder(arguments), arguments.to, decode=decode)
    lines = [
        f"{arguments.to}: {done.trajectories} trajectories of {done.sessions} sessions",
        *([f"left out: {done.failed} sessions that failed; `sessions list` says why"] if done.failed else []),
        *(f"left out: {why}" for why in done.unreadable),
    ]
    write_out("".join(f"{printable(line, width=None)}\n" for line in lines))
    return FOUND if done.unreadable else 0


def _folder(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder. Give what `rl-rollout serve` got as --sessions.")
    return folder


def add_sessions(parts: Any) -> None:
    """Add the command to those of `rl-rollout`."""
    sessions = parts.add_parser("sessions", help="sessions that a gateway has kept")
    verbs = sessions.add_subparsers(dest="verb", required=True, metavar="VERB")
    texts = (
        ("list", "show what there is", "One line a session; changes nothing."),
        (
            "export",
            "write a file to train on",
            EXPORTED,
        ),
    )
    for (name, summary, description), run in zip(texts, (run_list, run_export), strict=True):
        verb: argparse.ArgumentParser = verbs.add_parser(
            name,
            help=summary,
            description=description,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.set_defaults(run=run)
        verb.add_argument("folder", type=Path, metavar="FOLDER", help="given to `rl-rollout serve` as --sessions")
        if run is run_list:
            verb.add_argument("--json", action="store_true", help="as one JSON object")
        else:
            verb.add_argument("--to", type=Path, required=True, metavar="FILE", help="ends in .jsonl or .parquet")
            verb.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a model folder; adds texts")
