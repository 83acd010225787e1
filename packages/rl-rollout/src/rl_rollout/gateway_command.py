"""The commands `rl-rollout serve` and `rl-rollout sessions`; what they need is imported when they run."""

import argparse
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rl_rollout.engines.registry import known_engines

LONGEST = 1 << 40


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model folder to agents, and keep what trains.

    Serves a model folder to agents, over OpenAI's and Anthropic's APIs, and keeps exactly the tokens that it samples.
    The owner's key opens sessions, one for each run of an agent; the session's key is the agent's API key.
    With --open-session one session is open from the beginning: point any SDK at it. With --sessions the next start
    continues it, and shows the same key.
    Ctrl-C or SIGTERM ends it; requests under way get some seconds.

    Examples:
      rl-rollout serve models/Qwen3-0.6B --open-session
      rl-rollout serve models/Qwen3-0.6B --engine-options '{"dtype": "bfloat16", "max_model_len": 8192}' --port 9000
      rl-rollout serve models/Qwen3-0.6B --decided-by run --owner-key-file owner.key --sessions sessions
    """
    return _called("standalone:run_serve", arguments)


def list_sessions(arguments: argparse.Namespace) -> int:
    """Show the sessions that a gateway has kept.

    A line for each session that a gateway has kept, with the reason of each that failed. Changes nothing.

    Example:
      rl-rollout sessions list sessions
    """
    return _called("exports:run_list", arguments)


def export_sessions(arguments: argparse.Namespace) -> int:
    """Write a file of kept sessions to train on.

    Writes a row for each trajectory of the finished sessions that have a reward. Its columns: session, prompt_uid,
    session_index, output_index, parent, input_ids, loss_mask, rollout_logprobs, policy_versions, num_prompt_tokens,
    finish_reason, reward, reward_components, metadata (the last two as JSON texts in Parquet).
    Sessions that failed are counted and left out. The file appears whole or not at all.
    Exit status: 0; 1 where files of sessions cannot be read; 2 where the command cannot do what it is told.

    Example:
      rl-rollout sessions export sessions --to rollouts.parquet
    """
    return _called("exports:run_export", arguments)


def _called(place: str, arguments: argparse.Namespace) -> int:
    """Import a function from a module of the gateway."""
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
    add("--engine-options", default="{}", metavar="JSON", help="of the engine, as one JSON object")
    own = "run the engine in a process of its own, beside the server's (default: vllm, yes)"
    add("--engine-process", action=argparse.BooleanOptionalAction, help=own)
    add("--host", default="127.0.0.1", help="address (default: 127.0.0.1); others need a network that is trusted")
    add("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    add("--model", metavar="NAME", help="what clients see (default: the folder's name)")
    add("--owner-key-file", type=Path, metavar="FILE", help="holds the owner's key; made if it is not there")
    add("--sessions", type=Path, metavar="FOLDER", help="keep sessions there; a restart continues them")
    queue = "put finished sessions into the SharedMemoryQueue with this `address`; needs --sessions"
    add("--queue", metavar="ADDRESS", help=queue)
    add("--open-session", action="store_true", help="open a session without limits at once, and show its key")
    add = parser.add_argument_group("how requests are answered").add_argument
    who = "who decides on temperature, top-p, top-k and seed; training needs run (default: client)"
    add("--decided-by", choices=("client", "run"), default="client", help=who)
    add("--temperature", type=float, default=1.0, help="where the client does not decide (default: 1)")
    add("--top-p", type=float, default=1.0, help="the same (default: 1)")
    add("--top-k", type=int, metavar="K", help="the same (default: all tokens)")
    add("--seed", type=int, help="the same (default: none)")
    add("--max-tokens", type=int, default=LONGEST, help="most tokens of an answer (default: what the context leaves)")
    parsers = "reads calls: hermes, another name of ours, path.py:Class, vllm:NAME, or none (default: hermes)"
    add("--tool-parser", default="hermes", type=lambda name: None if name == "none" else name, help=parsers)
    add("--reasoning-parser", metavar="NAME", help="reads reasoning: vllm:NAME (default: <think>)")
    kept = "keep what was thought in later contexts, or drop it there (default: keep)"
    add("--reasoning", choices=("keep", "drop"), default="keep", help=kept)
    stops = "ends a turn too; may be repeated"
    add("--stop-token", action="append", default=[], dest="stop_tokens", metavar="TOKEN", help=stops)
    add("--chat-template", type=Path, metavar="FILE", help="Jinja, in place of the folder's own")

    verbs = parts.add_parser("sessions", help="sessions that a gateway has kept").add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )
    listing = _command(verbs, "list", list_sessions)
    export = _command(verbs, "export", export_sessions)
    for verb in (listing, export):
        verb.add_argument("folder", type=Path, metavar="FOLDER", help="given to `rl-rollout serve` as --sessions")
    export.add_argument("--to", type=Path, required=True, metavar="FILE", help="ends in .jsonl or .parquet")


def _command(parts: Any, name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add a command that uses a function's docstring as its help."""
    summary, _, description = inspect.cleandoc(run.__doc__ or "").partition("\n")
    parser: argparse.ArgumentParser = parts.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser
