"""How a live run is asked what it does, and told to take more engines or fewer: a socket that only its user can open.

The socket lies in a private folder, because the path of a run's folder may be too long for one; control.json in the
run's folder says where. Requests and answers are one line of JSON each.
"""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rl_core.errors import DeadlineError, NotReadyError, RLError
from rl_core.files import read_json_object, temporary_folder, write_durably

FILE = "control.json"
MAX_LINE_BYTES = 1 << 20
CREDENTIALS = struct.Struct("3i")

Handler = Callable[[Mapping[str, Any]], Awaitable[Any]]


class ControlSocket:
    """Answers requests while a run lives; a context manager."""

    def __init__(self, folder: Path, handle: Handler) -> None:
        """Name the run's folder, and who answers."""
        self._folder = folder
        self._handle = handle
        self._stack = ExitStack()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "ControlSocket":
        path = self._stack.enter_context(temporary_folder("rl-control-")) / "socket"
        self._server = await asyncio.start_unix_server(self._answer, str(path), limit=MAX_LINE_BYTES)
        path.chmod(0o600)
        write_durably(self._folder / FILE, json.dumps({"socket": str(path)}).encode())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        (self._folder / FILE).unlink(missing_ok=True)
        self._stack.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            _refuse_other_users(writer.get_extra_info("socket"))
            answer = await self._answer_to(await reader.readline())
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _answer_to(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                return {"error": "a request is a JSON object with a field `do`."}
            return {"answer": await self._handle(request)}
        except (ValueError, RecursionError) as error:
            return {"error": f"a request is one line of JSON: {error}."}
        except RLError as error:
            return {"error": str(error)}


def ask_run(folder: Path, request: Mapping[str, Any], *, deadline_s: float) -> Any:
    """Ask a live run.

    Args:
        folder: Of the run.
        request: With `do`, and what belongs to it.
        deadline_s: Longest wait for the answer.

    Raises:
        NotReadyError: No run lives there, or it refuses; the message says why.
        DeadlineError: It did not answer in time.
    """
    file = folder / FILE
    nobody = f"no run lives in {folder} that could be asked:"
    if not folder.is_dir():
        raise NotReadyError(
            f"{nobody} there is no such folder (looked in {Path.cwd()}). A run makes it when its settings are checked."
        )
    if not file.exists():
        holder = _holder(folder)
        if holder is not None:
            raise NotReadyError(
                f"process {holder} holds {folder} and cannot be asked: it loads its libraries, which takes seconds, or "
                f"has nearly ended; ask again. A run of rl-sync-trainer is asked by `rl-metrics doctor {folder}` alone."
            )
        raise NotReadyError(
            f"{nobody} it has no {FILE}, which rl-async-trainer keeps there while it runs. See how a run ended with "
            "rl-metrics doctor, and go on with it by train --resume."
        )
    try:
        place = read_json_object(file)["socket"]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(deadline_s)
            connection.connect(place)
            _refuse_other_users(connection)
            connection.sendall(json.dumps(dict(request)).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline(MAX_LINE_BYTES))
    except TimeoutError:
        raise DeadlineError(
            f"the run in {folder} did not answer within {deadline_s:g} s; see hang.json there."
        ) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotReadyError(f"{nobody} its process has ended. Go on with it by train --resume.") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotReadyError(f"{nobody} {type(error).__name__}: {error}.") from None
    if not isinstance(answer, dict) or "answer" not in answer:
        raise NotReadyError(
            str(answer["error"]) if isinstance(answer, dict) and "error" in answer else f"{file} answered none."
        )
    return answer["answer"]


def _holder(folder: Path) -> str | None:
    """The process that has the folder's lock, as the kernel says; None where nobody has it."""
    try:
        place = f":{(folder / '.lock').stat().st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return None
    return next((one[4] for one in locks if one[1] == "FLOCK" and one[5].endswith(place)), None)


def _refuse_other_users(connection: Any) -> None:
    """Speak with processes of this user and of root alone.

    Raises:
        ConnectionError: The other end is another user's.
    """
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if user not in (os.geteuid(), 0):
            raise ConnectionAbortedError(f"its other end belongs to user {user}")
