"""A gateway in a separate process, whose memory and files can be inspected from outside."""

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway_site import gateway_site


class GatewayChild:
    """The parent's side: `url`, `port`, `keys` of sessions, and the process."""

    def __init__(self, process: "subprocess.Popen[str]", told: dict[str, Any]) -> None:
        self.url, self.keys = str(told["url"]), list(told["keys"])
        self.port = int(self.url.rpartition(":")[2])
        self._proc = Path(f"/proc/{process.pid}")

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the process."""
        status = (self._proc / "status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    @property
    def num_files(self) -> int:
        return len(list((self._proc / "fd").iterdir()))


@contextlib.contextmanager
def gateway_child(*, num_sessions: int = 2, files: int = 256, **options: Any) -> Iterator[GatewayChild]:
    """Start a gateway that may open a number of `files`, with options."""
    given = json.dumps({"num_sessions": num_sessions, "files": files, "options": options})
    process = subprocess.Popen(
        [sys.executable, __file__, given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        told = next(line for line in process.stdout if line.startswith("{"))  # the log is on standard output too
        yield GatewayChild(process, json.loads(told))
        assert process.poll() is None, "the gateway has ended"
    finally:
        process.communicate(timeout=60)  # closes its input, which ends it


async def serve(given: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (given["files"], given["files"]))
    async with gateway_site(lambda heard: heard[-1] * 3, **given["options"]) as gateway:
        keys = [gateway.open("p", index).key for index in range(given["num_sessions"])]
        sys.stdout.write(json.dumps({"url": gateway.url, "keys": keys}) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
