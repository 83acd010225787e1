"""The commands `rl-rollout serve` and `rl-rollout sessions`; each imports its modules when it runs."""

import argparse
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rl_rollout.engines.options import known_engines

LONGEST = 1 << 40


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
    return _called("standalone:run_serve", arguments)


def list_sessions(arguments: argparse.Namespace) -> int:
    """List the sessions stored by a gateway.

    Prints one line per stored session, with the reason for each failed one. Changes nothing.

    Example:
      rl-rollout sessions list sessions
    """
    return _called("exports:run_list", arguments)


def export_sessions(arguments: argparse.Namespace) -> int:
    """Export stored sessions to a file for training.

    Writes one row per trajectory of each finished session with a reward. Columns: session, prompt_uid,
    session_index, output_index, parent, input_ids, loss_mask, rollout_logprobs, policy_versions, num_prompt_tokens,
    finish_reason, reward, reward_components, metadata (the last two as JSON strings in Parquet).
    Failed sessions are counted and omitted. The file is written atomically.
    Exit status: 0; 1 if files of sessions cannot be read; 2 if the command cannot run as requested.

    Example:
      rl-rollout sessions export sessions --to rollouts.parquet
    """
    return _called("exports:run_export", arguments)


def _called(place: str, arguments: argparse.Namespace) -> int:
    """Import a function from a module of the gateway and call it."""
    module, name = place.split(":")
    called: Callable[[argparse.Namespace], int] = getattr(import_module(f"rl_rollout.gateway.{module}"), name)
    return called(arguments)


def add_gateway(parts: Any) -> None:
    """Add the commands to the `rl-rollout` command line."""
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


def _command(parts: Any, name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add a command that uses a function's docstring as its help."""
    summary, _, description = inspect.cleandoc(run.__doc__ or "").partition("\n")
    parser: argparse.ArgumentParser = parts.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser
