"""The command line: serve."""

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_core.errors import SettingsError
from rl_core.files import read_plain
from rl_core.terminal_text import describe_version, say, use_utf8
from rl_trainer_parts.commands.command_line import HELP, MISTAKE, read_settings, run_command

if TYPE_CHECKING:
    from rl_service.settings import ServiceSettings

NAME = "rl-service"
KEY_PREFIX = "tml-"
STOPPING = (signal.SIGINT, signal.SIGTERM)
LAST_POLLS_S = 1.0
"""Time for clients that are between two polls to learn that the service stops."""
USAGE = """usage: rl-service serve [SETTINGS.toml] --policy MODEL_FOLDER [--section.name=value ...]

  serve [SETTINGS.toml] --policy MODEL_FOLDER [--section.name=value ...]
      Serve a policy to programs that are written for the Tinker API, until Ctrl-C or SIGTERM.
  serve --help [SECTION]
      Explain every setting, or those of one section."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if arguments is None:
        use_utf8()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in HELP:
        say(USAGE)
        return 0 if words else MISTAKE
    if words[0] == "--version":
        say(describe_version(NAME))
        return 0
    asked = [index for index, word in enumerate(words) if word in HELP]
    if asked:
        return run_command(("help", *words[asked[0] + 1 :]), {"help": _explain})
    return run_command(words, {"serve": _serve})


def _explain(words: list[str]) -> int:
    from rl_service.settings import ServiceSettings
    from rl_trainer_parts.settings.fields import help_text

    topic = words[0].lstrip("-").partition("=")[0] if words else ""
    with suppress(BrokenPipeError):  # the reader, such as `head`, has closed the pipe
        say(help_text(USAGE, cast("Any", ServiceSettings), topic=topic))
    return 0


def _serve(words: list[str]) -> int:
    """`serve [SETTINGS.toml] --policy MODEL_FOLDER [--section.name=value ...]`."""
    from rl_service.settings import ServiceSettings, check_unused

    if not words:
        raise SettingsError(f"serve needs a policy: {NAME} serve --policy MODEL_FOLDER")
    words = [f"--policy.path{word.removeprefix('--policy')}" if _is_policy(word) else word for word in words]
    settings = cast("ServiceSettings", read_settings(words, cast("Any", ServiceSettings), command=f"{NAME} serve"))
    check_unused(settings)
    asyncio.run(serve(settings))
    return 0


def _is_policy(word: str) -> bool:
    return word == "--policy" or word.startswith("--policy=")


async def serve(settings: "ServiceSettings") -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        RLError: The service cannot be started; the message says what to do.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        say("Stopping. A running training request finishes first; Ctrl-C or SIGTERM again ends at once.")
        task.cancel()  # type: ignore[union-attr]  # a coroutine runs in a task

    for number in STOPPING:
        loop.add_signal_handler(number, stop)
    with suppress(asyncio.CancelledError):
        async with running(settings) as url:
            say(f"Serving {settings.policy.all_names[0]} at {url}.")
            say(f"  TINKER_BASE_URL={url} TINKER_API_KEY=$(cat {settings.server.own_key_file}) python ...")
            await asyncio.Event().wait()


@asynccontextmanager
async def running(settings: "ServiceSettings") -> AsyncIterator[str]:
    """Run a service in its folder while the context is open; yields its address.

    Raises:
        RLError: The service cannot be started; the message says what to do.
    """
    from rl_trainer_parts.run.folder import RunFolder

    with RunFolder(settings.server.folder, setting="server.folder").held():
        async with _running(settings) as url:
            yield url


@asynccontextmanager
async def _running(settings: "ServiceSettings") -> AsyncIterator[str]:
    from rl_rollout.gateway import Listener
    from rl_service.routes import Routes
    from rl_service.service import TrainingService

    server = settings.server
    service = TrainingService(settings)
    listener = Listener(
        Routes(service, settings, read_key(server.own_key_file)).application(),
        max_connections=server.max_connections,
        patience_s=server.client_timeout_s,
        every_second=service.tick,
    )
    try:
        listener.bind(server.host, server.port)
        await service.start()
        yield f"http://{server.host}:{await listener.start()}"
    finally:
        if service.stop():
            await asyncio.sleep(LAST_POLLS_S)
        await listener.close()
        await service.close()


def read_key(file: Path) -> str:
    """Read the key of all clients; make the file, which only this user may read, if it does not exist.

    Raises:
        SettingsError: It is not a key that the client accepts.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(f"{KEY_PREFIX}{secrets.token_urlsafe(32)}\n")
    key = read_plain(file, max_bytes=4096, error=SettingsError).decode(errors="replace").strip()
    if not key.startswith(KEY_PREFIX) or len(key) < 36:
        raise SettingsError(f'{file} must have a key of at least 36 characters that begins with "{KEY_PREFIX}".')
    return key


if __name__ == "__main__":
    raise SystemExit(main())
