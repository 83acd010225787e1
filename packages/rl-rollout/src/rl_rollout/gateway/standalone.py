"""The gateway as a standalone program: an engine, sessions over HTTP, and a clean shutdown."""

import asyncio
import secrets
import signal
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_core.errors import SettingsError
from rl_core.files import read_plain
from rl_core.queue import SharedMemoryQueue
from rl_core.terminal_text import write_out
from rl_rollout.engines.options import TransformersOptions, VLLMOptions, engine_class
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.engines.protocol import GenerateRequest, RolloutEngine, SamplingParams
from rl_rollout.engines.requests import check_request
from rl_rollout.gateway.exports import QueueFeed
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.server import Gateway, GatewayOptions
from rl_rollout.gateway.service import ServiceOptions
from rl_rollout.gateway.sessions import SessionLimits
from rl_rollout.prompts.tokenizer import PromptTokenizer

ENGINE_OPTIONS: dict[str, Any] = {"vllm": VLLMOptions, "transformers": TransformersOptions}
ENDLESS = SessionLimits(max_turns=1 << 40, max_tokens=1 << 50, max_concurrent=1024, wall_s=1e9)
MAX_KEY_BYTES = 4096
FEED_S = 1.0
OF_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
OF_SERVICE = ("decided_by", "tool_parser", "reasoning_parser", "structures", "reasoning", "stop_tokens")


def run_serve(arguments: Namespace) -> int:
    """Run `serve` until SIGINT or SIGTERM; running requests then get some seconds to finish.

    Raises:
        RLError: The gateway cannot be started, or its engine has failed; the message says what to do.
    """
    asyncio.run(_serve(arguments))
    return 0


async def _serve(arguments: Namespace) -> None:
    given, feed, key_file = vars(arguments), _feed(arguments), arguments.owner_key_file
    template = None if arguments.chat_template is None else arguments.chat_template.read_text()
    engine, image_folder = _engine(arguments)
    tokenizer = PromptTokenizer.load(arguments.folder, chat_template=template, image_folder=image_folder)
    sampling = SamplingParams(**{name: given[name] for name in OF_SAMPLING})
    gateway = Gateway(
        engine,
        tokenizer,
        GatewayOptions(
            **{name: given[name] for name in ("host", "port", "sessions")},
            model=arguments.model or arguments.folder.resolve().name,
            owner_key=None if key_file is None else _owner_key(key_file),
            service=ServiceOptions(**{name: given[name] for name in OF_SERVICE}),
        ),
        sampling=sampling,
    )
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)  # type: ignore[union-attr]  # a coroutine runs in a task
    try:
        gateway.bind()
        with suppress(asyncio.CancelledError):
            await engine.start()
            shortest = replace(sampling, max_tokens=1)  # fails now if the engine does not support the defaults
            check_request(GenerateRequest(input_ids=np.zeros(1, np.int32), sampling=shortest), engine.traits)
            await gateway.start()
            write_out(_greeting(gateway, key_file, opens_session=arguments.open_session))
            while (failure := gateway.service.engine_failure) is None:
                await asyncio.sleep(FEED_S)
                await asyncio.to_thread(feed)
            raise failure
    finally:
        await gateway.close()
        await engine.close()
        feed()


def _engine(arguments: Namespace) -> tuple[RolloutEngine, Path | None]:
    """Create the engine, without starting it. Also return the folder of its images."""
    name = arguments.engine
    try:
        options = msgspec.json.decode(arguments.engine_options, type=dict[str, Any])
        made = ENGINE_OPTIONS[name](**options) if name in ENGINE_OPTIONS else options
        image_folder = options.get("image_folder")
        if name == "vllm" if arguments.engine_process is None else arguments.engine_process:
            return ProcessEngine(name, arguments.folder, made, host=EnginePlacement()), image_folder
        engine: RolloutEngine = engine_class(name)(arguments.folder, made)
    except (msgspec.MsgspecError, TypeError) as error:
        fields = ", ".join(getattr(ENGINE_OPTIONS.get(name), "__dataclass_fields__", ("as defined by the engine",)))
        raise SettingsError(
            f"--engine-options must be a JSON object with options of {name}: {error}. Fields: {fields}."
        ) from None
    return engine, image_folder


def _owner_key(file: Path) -> str:
    """Read the owner's key from a file; create the file, readable only by this user, if it does not exist."""
    if not file.exists():
        _write_key(file, f"rl-owner-{secrets.token_urlsafe(32)}")
    return _read_key(file)


def _standing_key(gateway: Gateway) -> str:
    """Return the key of the session without limits, which is opened unless that of an earlier start is still open."""
    file = None if gateway.journal is None else gateway.journal.folder / "standing.key"
    if file is not None:
        with suppress(SettingsError, RefusedError):
            key = _read_key(file)
            gateway.sessions.by_key(key)
            return key
    key = gateway.open("standing", limits=ENDLESS).key
    if file is not None:
        file.unlink(missing_ok=True)
        _write_key(file, key)
    return key


def _write_key(file: Path, key: str) -> None:
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(f"{key}\n")


def _read_key(file: Path) -> str:
    return read_plain(file, max_bytes=MAX_KEY_BYTES, error=SettingsError).decode(errors="replace").strip()


def _feed(arguments: Namespace) -> Callable[[], None]:
    """Return a function that puts finished sessions into the queue from the arguments, if there is one."""
    if arguments.queue is None:
        return lambda: None
    if arguments.sessions is None:
        raise SettingsError("--queue needs --sessions FOLDER, so that no session is lost before it is queued.")
    return QueueFeed(arguments.sessions, SharedMemoryQueue.connect(arguments.queue)).put_all


def _greeting(gateway: Gateway, key_file: Path | None, *, opens_session: bool) -> str:
    """Return the message printed at the start: the gateway's URL and keys, and example commands."""
    url, traits = gateway.url, gateway.service.engine.traits
    owner, kept = (gateway.owner_key,) * 2 if key_file is None else (f"$(cat {key_file})", f"in {key_file}")
    key = _standing_key(gateway) if opens_session else "KEY_OF_THE_SESSION"
    begun = f"A session without limits is open; its key is {key}\n" if opens_session else ""
    note = ""
    if gateway.journal is not None and gateway.options.service.decided_by == "client":
        note = "Clients decide on sampling: tokens sampled with other parameters than this server's never train.\n\n"
    return (
        f"Serving {gateway.options.model} at {url} ({traits.name}, up to {traits.max_model_len} tokens).\n"
        f"The owner's key is {kept}\n{begun}\n" + note + "Open a session; the response has its key:\n"
        f'  curl -s {url}/sessions -H "Authorization: Bearer {owner}" -d \'{{"group": "my-prompt"}}\'\n'
        "Connect an SDK:\n"
        f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} python agent.py\n"
        f"  ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key} python agent.py\n"
    )
