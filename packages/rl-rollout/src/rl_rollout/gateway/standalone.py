"""The gateway as a program of its own: an engine, sessions over HTTP, and a clean end."""

import asyncio
import os
import secrets
import signal
from contextlib import suppress
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.files import read_plain
from rl_core.queue import SharedMemoryQueue
from rl_core.record_fields import settings_record
from rl_core.terminal_text import write_out
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.gateway.exports import QueueFeed
from rl_rollout.gateway.server import Gateway, GatewayOptions
from rl_rollout.gateway.sessions import SessionLimits
from rl_rollout.prompts.tokenizer import PromptTokenizer

ENDLESS = SessionLimits(max_turns=1 << 40, max_tokens=1 << 50, max_concurrent=1024, wall_s=1e9)
MAX_KEY_BYTES = 4096


@settings_record
class StandaloneOptions:
    """What a gateway does that stands alone.

    Attributes:
        sampling: How turns are drawn, where the client does not say.
        owner_key_file: Holds the owner's key; made where it is not there. None makes a key up and shows it.
        opens_session: Open one session without limits, and show its key.
        queue: Address of an `rl_core.queue.SharedMemoryQueue` that gets each finished session.
    """

    sampling: SamplingParams
    owner_key_file: Path | None = None
    opens_session: bool = False
    queue: str | None = None


def owner_key(file: Path) -> str:
    """The key in a file, which is made, for its user alone, where it is not there.

    Raises:
        SettingsError: It cannot be read or made.
    """
    try:
        made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_plain(file, max_bytes=MAX_KEY_BYTES, error=SettingsError).decode(errors="replace").strip()
    except OSError as error:
        raise SettingsError(f"the owner's key cannot be kept in {file}: {error.strerror}.") from error
    with os.fdopen(made, "w") as stream:
        stream.write(f"rl-owner-{secrets.token_urlsafe(32)}\n")
    return owner_key(file)


async def serve(
    engine: RolloutEngine, tokenizer: PromptTokenizer, options: GatewayOptions, alone: StandaloneOptions
) -> None:
    """Serve until SIGINT or SIGTERM; requests under way then get some seconds.

    Args:
        engine: Not started.
        tokenizer: The policy's.
        options: How to listen.
        alone: What else to do.

    Raises:
        SettingsError: The chat template cannot join turns, or the address is taken.
        EngineError: The engine cannot start.
    """
    feed = _feed(options.sessions, alone.queue)
    told = None if feed is None else (lambda _session, _result: feed.news.set())
    gateway = Gateway(engine, tokenizer, options, sampling=alone.sampling, on_finished=told)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)  # type: ignore[union-attr]  # a coroutine runs in a task
    try:
        gateway.bind()
        with suppress(asyncio.CancelledError):
            await engine.start()
            await gateway.start()
            write_out(greeting(gateway, alone))
            await (asyncio.Event().wait() if feed is None else feed.run())
    finally:
        await gateway.close()
        await engine.close()
        if feed is not None:
            await feed.put_all()


def _feed(sessions: Path | None, queue: str | None) -> QueueFeed | None:
    if queue is None:
        return None
    if sessions is None:
        raise SettingsError("a queue needs a folder of sessions (--sessions), so that none is lost on the way to it.")
    return QueueFeed(sessions, SharedMemoryQueue.connect(queue))


def greeting(gateway: Gateway, alone: StandaloneOptions) -> str:
    """Where the gateway is, and how one begins."""
    url, traits = gateway.url, gateway.service.engine.traits
    file = alone.owner_key_file
    shown = gateway.owner_key if file is None else f"$(cat {file})"
    lines = [
        f"Serving {gateway.options.model} at {url} ({traits.name}, up to {traits.max_model_len} tokens).",
        f"The owner's key is {gateway.owner_key}" if file is None else f"The owner's key is in {file}",
        "",
        "Open a session; the answer has its key:",
        f'  curl -s {url}/sessions -H "Authorization: Bearer {shown}" -d \'{{"group": "my-prompt"}}\'',
    ]
    key = "KEY_OF_THE_SESSION"
    if alone.opens_session:
        key = gateway.open("standing", limits=ENDLESS).key
        lines[2:] = ["", f"A session without limits is open; its key is {key}"]
    return "\n".join(
        [
            *lines,
            "Connect an SDK:",
            f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} python agent.py",
            f"  ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key} python agent.py",
            "",
        ]
    )
