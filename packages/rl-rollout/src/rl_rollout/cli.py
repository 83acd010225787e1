"""The command `rl-rollout`; the gateway's verbs import their modules when they run."""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import CacheError, RLError
from rl_core.terminal_text import describe_version, escaped_lines, json_text, use_utf8, write_out
from rl_rollout.engines.options import known_engines
from rl_rollout.skip.commands import (
    EntryReport,
    choose_entries,
    list_entries,
    open_store,
    prune_entries,
    report_entry,
)
from rl_rollout.skip.options import parse_bytes
from rl_rollout.skip.text import listing_text, pruning_text, verification_text, verified_text

FOUND, REFUSED, INTERRUPTED = 1, 2, 130
LONGEST = 1 << 40
ERASE_LINE = "\r\x1b[K"

EPILOG = "Exit status: 0; 1 if something is broken; 2 if the command cannot run as requested."
DIRECTORY = "a local folder, or a URL supported by fsspec, such as s3://bucket/rollouts"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program name; None uses sys.argv.

    Returns:
        The exit status: 0; 1 if an entry is broken; 2 if the command cannot run as requested.
    """
    if argv is None:
        use_utf8()
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except BrokenPipeError:
        return 0
    except (RLError, OSError) as error:
        _complain(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def list_cache(arguments: argparse.Namespace) -> int:
    """List entries.

    Lists entries from their descriptions and file sizes, without reading arrays.
    Broken entries are listed with path and reason, and do not change the exit status.

    Examples:
      rl-rollout cache ls skip-cache
      rl-rollout cache ls s3://bucket/rollouts --json
    """
    listing = list_entries(open_store(arguments.directory), arguments.directory)
    write_out(_as_json(listing) if arguments.json else listing_text(listing))
    return 0


def verify_cache(arguments: argparse.Namespace) -> int:
    """Verify the checksums of entries.

    Reads entries completely and verifies every checksum. Changes nothing.

    Examples:
      rl-rollout cache verify skip-cache
      rl-rollout cache verify skip-cache train-00000007-0000 8 9
    """
    directory = arguments.directory
    store = open_store(directory)
    chosen = choose_entries(store, directory, arguments.entries) if arguments.entries else store.entries()
    if not chosen:
        raise CacheError(f"{directory} has no entries.")
    verified: list[EntryReport] = []
    for number, key in enumerate(chosen, start=1):
        report = report_entry(store, key, reads_arrays=True)
        _say_progress(number, len(chosen))
        if report is None:
            continue
        verified.append(report)
        if not arguments.json:
            _erase_line()
            write_out(verified_text(report))
    num_broken = sum(entry.fault is not None for entry in verified)
    if arguments.json:
        entries = [{"name": each.name, "counts": each.counts, "fault": each.fault} for each in verified]
        write_out(_as_json({"directory": directory, "entries": entries, "num_broken": num_broken}))
    else:
        write_out(verification_text(len(verified), num_broken))
    return FOUND if num_broken else 0


def prune_cache(arguments: argparse.Namespace) -> int:
    """Remove old, broken or named entries.

    Removes leftovers of dead writers, then the named entries. --broken also removes broken entries, which
    reads all entries. --max-bytes then removes set-aside files and the oldest entries down to SIZE. An entry is
    removed completely, even while runs use the directory. Units: k, M, G, T are powers of 1000; Ki, Mi, Gi, Ti
    of 1024.

    Examples:
      rl-rollout cache prune skip-cache --max-bytes 50G --dry-run
      rl-rollout cache prune skip-cache --broken
      rl-rollout cache prune skip-cache train-00000007-0000 8
    """
    directory, is_dry_run = arguments.directory, arguments.dry_run
    if arguments.max_bytes is None and not arguments.broken and not arguments.entries:
        _complain("prune needs --max-bytes SIZE, --broken or an ENTRY to select what to remove.")
        return REFUSED
    store = open_store(directory)
    named = choose_entries(store, directory, arguments.entries)
    before = list_entries(store, directory)
    removed = prune_entries(
        store,
        before,
        named=named,
        is_broken=arguments.broken,
        max_bytes=arguments.max_bytes,
        is_dry_run=is_dry_run,
        on_read=_say_progress,
    )
    names, removed_bytes = {each.name for each in removed}, sum(each.size_bytes for each in removed)
    kept = sum(entry.name not in names for entry in before.entries), before.size_bytes - removed_bytes
    if not arguments.json:
        write_out(pruning_text(removed, kept=kept, is_dry_run=is_dry_run))
        return 0
    facts = {"removed_bytes": removed_bytes, "kept_entries": kept[0], "kept_bytes": kept[1]}
    write_out(_as_json({"directory": directory, "is_dry_run": is_dry_run, "removed": removed, **facts}))
    return 0


def _as_json(found: Any) -> str:
    return json_text(msgspec.to_builtins(found))


def _say_progress(num_read: int, num_all: int) -> None:
    """Show the reading progress on one terminal line, and erase it at the end."""
    _erase_line(f"read {num_read} of {num_all} entries" if num_read < num_all else "")


def _erase_line(then: str = "") -> None:
    if sys.stderr.isatty():
        sys.stderr.write(ERASE_LINE + then)
        sys.stderr.flush()


def _complain(text: str) -> None:
    sys.stderr.write("rl-rollout: " + escaped_lines(text) + "\n")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl-rollout", description="Serve models to agents, and inspect stored rollouts."
    )
    parser.add_argument("--version", action="version", version=describe_version("rl-rollout"))
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    _add_gateway(parts)
    _add_cache(parts)
    return parser


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model folder to agents, and record trainable trajectories.

    Serves a model folder over OpenAI's and Anthropic's APIs, and records exactly the tokens that it samples.
    The owner's key opens sessions, one per agent run; the session's key is the agent's API key.
    --open-session opens one session at the start, for use with any SDK. With --sessions, the next start
    resumes it with the same key.
    Ctrl-C or SIGTERM stops the server; running requests get a few seconds to finish. If the engine fails, the
    server stops with exit status 2; with --sessions, the next start continues its sessions.

    Examples:
      rl-rollout serve models/Qwen3-0.6B --open-session
      rl-rollout serve models/Qwen3-0.6B --engine-options '{"dtype": "bfloat16", "max_model_len": 8192}' --port 9000
      rl-rollout serve models/Qwen3-0.6B --decided-by run --owner-key-file owner.key --sessions sessions
    """
    from rl_rollout.gateway.standalone import run_serve

    return run_serve(arguments)


def list_sessions(arguments: argparse.Namespace) -> int:
    """List the sessions stored by a gateway.

    Prints one line per stored session, with the reason for each failed one. Changes nothing.

    Example:
      rl-rollout sessions list sessions
    """
    from rl_rollout.gateway.exports import run_list

    return run_list(arguments)


def export_sessions(arguments: argparse.Namespace) -> int:
    """Export stored sessions to a file for training.

    Writes one row per trajectory of each finished session with a reward. Columns: session, prompt_uid,
    session_index, output_index, parent, input_ids, loss_mask, rollout_logprobs, policy_versions, num_prompt_tokens,
    finish_reason, reward, images (digest, start and length of each), reward_components, metadata (the last three as
    JSON strings in Parquet).
    Failed sessions are counted and omitted. The file is written atomically.
    Exit status: 0; 1 if files of sessions cannot be read; 2 if the command cannot run as requested.

    Example:
      rl-rollout sessions export sessions --to rollouts.parquet
    """
    from rl_rollout.gateway.exports import run_export

    return run_export(arguments)


def _add_gateway(parts: Any) -> None:
    """Add the gateway's commands."""
    parser = _command(parts, "serve", serve)
    names = ", ".join(name for name in known_engines() if name != "scripted")
    add = parser.add_argument
    add("folder", type=Path, metavar="MODEL_FOLDER", help="a Hugging Face folder; nothing is downloaded")
    add("--engine", default="vllm", metavar="NAME", help=f"{names} (default: vllm)")
    add("--engine-options", default="{}", metavar="JSON", help="engine options as one JSON object")
    own = "run the engine in a separate process (default: yes for vllm)"
    add("--engine-process", action=argparse.BooleanOptionalAction, help=own)
    host = "address (default: 127.0.0.1); use others only in trusted networks"
    add("--host", default="127.0.0.1", help=host)
    add("--port", type=int, default=8000, help="port; 0 chooses a free one (default: 8000)")
    add("--model", metavar="NAME", help="model name shown to clients (default: the folder's name)")
    add("--owner-key-file", type=Path, metavar="FILE", help="file with the owner's key; created if missing")
    add("--sessions", type=Path, metavar="FOLDER", help="store sessions in this folder; a restart resumes them")
    queue = "put finished sessions into the SharedMemoryQueue with this `address`; needs --sessions"
    add("--queue", metavar="ADDRESS", help=queue)
    add("--open-session", action="store_true", help="open an unlimited session at the start, and print its key")
    add = parser.add_argument_group("request handling").add_argument
    who = "source of temperature, top-p, top-k and seed; training requires run (default: client)"
    add("--decided-by", choices=("client", "run"), default="client", help=who)
    add("--temperature", type=float, default=1.0, help="used if the client does not set it (default: 1)")
    add("--top-p", type=float, default=1.0, help="as for --temperature (default: 1)")
    add("--top-k", type=int, metavar="K", help="as for --temperature (default: all tokens)")
    add("--seed", type=int, help="as for --temperature (default: none)")
    add("--max-tokens", type=int, default=LONGEST, help="maximum response tokens (default: the rest of the context)")
    parsers = "parser of tool calls: a registered name, path.py:Class, vllm:NAME, or none (default: hermes)"
    add("--tool-parser", default="hermes", type=lambda name: None if name == "none" else name, help=parsers)
    add("--reasoning-parser", metavar="NAME", help="parser of reasoning: vllm:NAME (default: <think> tags)")
    formed = "response formats and forced calls: ignore, or enforce without training on them (default: as --decided-by)"
    add("--structures", choices=("ignore", "enforce"), help=formed)
    kept = "keep or drop reasoning in later contexts (default: keep)"
    add("--reasoning", choices=("keep", "drop"), default="keep", help=kept)
    stops = "additional token that ends a turn; repeatable"
    add("--stop-token", action="append", default=[], dest="stop_tokens", metavar="TOKEN", help=stops)
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template that replaces the folder's")

    verbs = parts.add_parser("sessions", help="list or export the sessions stored by a gateway").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    listing = _command(verbs, "list", list_sessions)
    export = _command(verbs, "export", export_sessions)
    for verb in (listing, export):
        verb.add_argument("folder", type=Path, metavar="FOLDER", help="folder set with `rl-rollout serve --sessions`")
    export.add_argument("--to", type=Path, required=True, metavar="FILE", help="output file, .jsonl or .parquet")


def _add_cache(parts: Any) -> None:
    """Add the commands of skip caches."""
    cache = parts.add_parser(
        "cache",
        help="inspect skip caches: stored rollouts that runs replay",
        description="Inspect a skip cache, the directory set as rollout_cache.directory; safe while runs use it.",
        epilog=EPILOG,
    )
    verbs = cache.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = _command(verbs, "ls", list_cache)
    verify = _command(verbs, "verify", verify_cache)
    prune = _command(verbs, "prune", prune_cache)
    for verb in (listing, verify, prune):
        verb.epilog = EPILOG
        verb.add_argument("directory", metavar="DIR", help=DIRECTORY)
        verb.add_argument("--json", action="store_true", help="print one JSON object")
    verify.add_argument("entries", nargs="*", metavar="ENTRY", help="names or steps (default: all)")
    prune.add_argument("entries", nargs="*", metavar="ENTRY", help="names or steps of entries to remove")
    prune.add_argument("--max-bytes", type=_size, metavar="SIZE", help="maximum total size after pruning")
    broken = "read every entry completely, and remove broken entries and the files set aside in broken/"
    prune.add_argument("--broken", action="store_true", help=broken)
    prune.add_argument("--dry-run", action="store_true", help="list what would be removed; change nothing")


def _command(parts: Any, name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add a command that uses a function's docstring as its help."""
    summary, _, description = inspect.cleandoc(run.__doc__ or "").partition("\n")
    parser: argparse.ArgumentParser = parts.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser
