"""The command `rl-rollout serve`; the gateway and the engine are imported when it runs."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import SettingsError
from rl_rollout.engines.options import TransformersOptions, VLLMOptions
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.engines.registry import engine_class, known_engines

OPTIONS: dict[str, Any] = {"vllm": VLLMOptions, "transformers": TransformersOptions}
LONGEST = 1 << 40
DEFAULT_PORT = 8000
DESCRIPTION = """\
Serves a model folder to agents, over OpenAI's and Anthropic's APIs, and keeps exactly the tokens that it samples.
Whoever has the owner's key opens sessions, one for each run of an agent; the session's key is the agent's API key.
With --open-session one session is open from the beginning: point any SDK at it.
Ctrl-C or SIGTERM ends it; requests under way get some seconds."""
EXAMPLES = """\
examples:
  rl-rollout serve models/Qwen3-0.6B --open-session
  rl-rollout serve models/Qwen3-0.6B --engine-options '{"dtype": "bfloat16", "max_model_len": 8192}' --port 9000
  rl-rollout serve models/Qwen3-0.6B --decided-by run --owner-key-file owner.key --sessions sessions"""


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal.

    Raises:
        RLError: Something cannot be served; the message says what to do.
    """
    from rl_rollout.gateway.server import GatewayOptions  # needs an extra
    from rl_rollout.gateway.service import ServiceOptions
    from rl_rollout.gateway.standalone import StandaloneOptions, owner_key, serve
    from rl_rollout.prompts.tokenizer import PromptTokenizer

    given = vars(arguments)
    template = None if arguments.chat_template is None else arguments.chat_template.read_text()
    tokenizer = PromptTokenizer.load(arguments.folder, chat_template=template)
    file = arguments.owner_key_file
    options = GatewayOptions(
        **{name: given[name] for name in ("host", "port", "sessions")},
        model=arguments.model or arguments.folder.resolve().name,
        owner_key=None if file is None else owner_key(file),
        service=ServiceOptions(
            **{name: given[name] for name in ("decided_by", "reasoning_parser", "reasoning")},
            tool_parser=None if arguments.tool_parser == "none" else arguments.tool_parser,
            stop_tokens=tuple(arguments.stop_token),
        ),
    )
    sampling = SamplingParams(**{name: given[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")})
    alone = StandaloneOptions(
        sampling=sampling, owner_key_file=file, opens_session=arguments.open_session, queue=arguments.queue
    )
    asyncio.run(serve(_engine(arguments), tokenizer, options, alone))
    return 0


def _engine(arguments: argparse.Namespace) -> RolloutEngine:
    """The engine that is asked for; not started."""
    name = arguments.engine
    try:
        options = msgspec.json.decode(arguments.engine_options, type=dict[str, Any])
        made = OPTIONS[name](**options) if name in OPTIONS else options
        if arguments.engine_process:
            return _in_process(name, arguments.folder, made)
        engine: RolloutEngine = engine_class(name)(arguments.folder, made)
    except (msgspec.MsgspecError, TypeError) as error:
        known = f" Fields: {', '.join(OPTIONS[name].__dataclass_fields__)}." if name in OPTIONS else ""
        raise SettingsError(f"--engine-options must be a JSON object of options of {name}: {error}.{known}") from None
    return engine


def _in_process(name: str, folder: Path, options: Any) -> RolloutEngine:
    from rl_rollout.engines.process import EnginePlacement, ProcessEngine  # imports the clusters

    return ProcessEngine(name, folder, options, host=EnginePlacement())


def add_serve(parts: Any) -> None:
    """Add the command to those of `rl-rollout`."""
    serve: argparse.ArgumentParser = parts.add_parser(
        "serve",
        help="serve a model to agents, and keep what trains",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.set_defaults(run=run_serve)
    names = [name for name in known_engines() if name != "scripted"]
    add = serve.add_argument
    add("folder", type=Path, metavar="MODEL_FOLDER", help="a Hugging Face folder; nothing is downloaded")
    add("--engine", default="vllm", metavar="NAME", help=f"{', '.join(names)} (default: vllm)")
    add("--engine-options", default="{}", metavar="JSON", help="of the engine, as one JSON object")
    add("--engine-process", action="store_true", help="run the engine in a process of its own")
    add("--host", default="127.0.0.1", help="address (default: 127.0.0.1); others need a network that is trusted")
    add("--port", type=int, default=DEFAULT_PORT, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    add("--model", metavar="NAME", help="what clients see (default: the folder's name)")
    add("--owner-key-file", type=Path, metavar="FILE", help="holds the owner's key; made if it is not there")
    add("--sessions", type=Path, metavar="FOLDER", help="keep sessions there; a restart goes on with them")
    add("--queue", metavar="ADDRESS", help="put finished sessions into this queue; needs --sessions")
    add("--open-session", action="store_true", help="open a session without limits at once, and show its key")
    _add_answers(serve)


def _add_answers(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument_group("how requests are answered").add_argument
    who = "who decides on temperature, top-p, top-k and seed; training needs run (default: client)"
    add("--decided-by", choices=("client", "run"), default="client", help=who)
    add("--temperature", type=float, default=1.0, help="where the client does not decide (default: 1)")
    add("--top-p", type=float, default=1.0, help="the same (default: 1)")
    add("--top-k", type=int, metavar="K", help="the same (default: all tokens)")
    add("--seed", type=int, help="the same (default: none)")
    add("--max-tokens", type=int, default=LONGEST, help="most tokens of an answer (default: what the context leaves)")
    parsers = "reads calls: hermes, another name of ours, path.py:Class, vllm:NAME, or none (default: hermes)"
    add("--tool-parser", default="hermes", metavar="NAME", help=parsers)
    add("--reasoning-parser", metavar="NAME", help="reads reasoning: vllm:NAME (default: <think>)")
    kept = "keep what was thought in later contexts, or drop it there (default: keep)"
    add("--reasoning", choices=("keep", "drop"), default="keep", help=kept)
    add("--stop-token", action="append", default=[], metavar="TOKEN", help="ends a turn too; may be repeated")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja, in place of the folder's own")
