"""The socket through which a live run answers `status` and `scale`; only its user can open it.

The socket is in a private folder, because the path of a run's folder may be too long for a socket; control.json in the
run's folder has its path. Requests and answers are one line of JSON each.
"""

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rl_core.errors import DeadlineError, NotReadyError, RLError
from rl_core.files import read_json_object, temporary_folder, write_durably

FILE = "control.json"
SUPERVISOR_LOCK = ".supervisor"
"""Locked by a supervisor that is restarting the run's process."""
MAX_LINE_BYTES = 1 << 20
CREDENTIALS = struct.Struct("3i")

Handler = Callable[[Mapping[str, Any]], Awaitable[Any]]


@asynccontextmanager
async def control_socket(folder: Path, handle: Handler) -> AsyncIterator[None]:
    """Answer requests to the run in a folder with a function."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            _refuse_other_users(writer.get_extra_info("socket"))
            answer = await _answer(await reader.readline(), handle)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    with temporary_folder("rl-control-") as private:
        path = private / "socket"
        server = await asyncio.start_unix_server(serve, str(path), limit=MAX_LINE_BYTES)
        path.chmod(0o600)
        write_durably(folder / FILE, json.dumps({"socket": str(path)}).encode())
        try:
            yield
        finally:
            server.close()
            (folder / FILE).unlink(missing_ok=True)


async def _answer(line: bytes, handle: Handler) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            return {"error": "a request must be a JSON object with a field `do`."}
        return {"answer": await handle(request)}
    except (ValueError, RecursionError) as error:
        return {"error": f"a request must be one line of JSON: {error}."}
    except RLError as error:
        return {"error": str(error)}


def ask_run(folder: Path, request: Mapping[str, Any], *, deadline_s: float) -> Any:
    """Send a request to a live run.

    Args:
        folder: The run's folder.
        request: Has `do` and its arguments.
        deadline_s: Maximum wait for the answer.

    Raises:
        NotReadyError: No run is alive there, or it refuses; the message has the reason.
        DeadlineError: It did not answer in time.
    """
    file = folder / FILE
    nobody = f"no live run in {folder}:"
    if not folder.is_dir():
        raise NotReadyError(
            f"{nobody} the folder does not exist (looked in {Path.cwd()}). A run creates it after checking its "
            "settings."
        )
    restarts = _restarts(folder)
    if not file.exists():
        holder = _holder(folder, ".lock")
        if holder is not None:
            raise NotReadyError(
                f"process {holder} holds {folder} but does not answer, because it is loading libraries or about to "
                f"end. Try again in a few seconds. For a run of rl-sync-trainer, use `rl-metrics doctor {folder}`."
            )
        raise NotReadyError(
            restarts
            or f"{nobody} it has no {FILE}, which exists while rl-async-trainer runs. To see how a run ended, use "
            "`rl-metrics doctor`; to continue it, use `train --resume`."
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
        raise NotReadyError(restarts or f"{nobody} its process has ended. Continue it with `train --resume`.") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotReadyError(f"{nobody} {type(error).__name__}: {error}.") from None
    if not isinstance(answer, dict) or "answer" not in answer:
        refusal = answer.get("error") if isinstance(answer, dict) else None
        raise NotReadyError(f"the socket in {file} sent no answer." if refusal is None else str(refusal))
    return answer["answer"]


def _restarts(folder: Path) -> str | None:
    """What to say of a run whose process was killed while its supervisor is alive; None without one."""
    supervisor = _holder(folder, SUPERVISOR_LOCK)
    if supervisor is None:
        return None
    return (
        f"the process of the run in {folder} was killed, and its supervisor (process {supervisor}) is restarting it "
        "from the last checkpoint. Do not resume it by hand; try again in a minute."
    )


def _holder(folder: Path, name: str) -> str | None:
    """The process that holds a lock of the folder, according to the kernel; None if unlocked."""
    try:
        place = f":{(folder / name).stat().st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return None
    return next((one[4] for one in locks if one[1] == "FLOCK" and one[5].endswith(place)), None)


def _refuse_other_users(connection: Any) -> None:
    """Accept only processes of this user and of root.

    Raises:
        ConnectionError: The other end belongs to another user.
    """
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if user not in (os.geteuid(), 0):
            raise ConnectionAbortedError(f"the other end belongs to user {user}")
