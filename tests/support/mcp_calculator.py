"""An MCP server whose tools add, fail, hang, die and flood, over stdio, or over HTTP on a given port."""

import asyncio
import os
import shlex
import subprocess
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp_types import CallToolResult

OUTPUT = os.dup(1)  # the server hides its standard output from its tools
server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


@server.tool()
def environment(name: str) -> str:
    """Return a variable of the server's environment."""
    return os.environ.get(name, "none")


@server.tool()
def draw() -> list[str | Image]:
    """Return a text and a picture."""
    return ["a drawing", Image(data=b"PNG", format="png")]


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("out of order")


@server.tool()
def die() -> str:
    """Ends the server."""
    sys.stderr.write("I die.\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
async def dawdle() -> str:
    """Block for long while the server answers others."""
    await asyncio.sleep(600)
    return "late"


@server.tool()
async def freeze() -> str:
    """Block the whole server for long."""
    time.sleep(600)
    return "late"


@server.tool()
def flood(size: int) -> str:
    """Give size characters."""
    return "x" * size


@server.tool()
def babble(lines: int) -> str:
    """Write non-messages and invalid UTF-8 to stdout."""
    for index in range(lines):
        os.write(OUTPUT, f"line {index}\n".encode())
    os.write(OUTPUT, b"\xff\n")
    return "said"


@server.tool()
def measure() -> CallToolResult:
    """Return a result without text."""
    return CallToolResult(content=[], structured_content={"width": 3, "unit": "µm"})


@server.tool()
def spawn(manner: str) -> str:
    """Start a process that keeps running, and return its process id."""
    sleep = ["sleep", "600"]
    if manner == "orphan":
        command = f"{shlex.join(sleep)} >/dev/null 2>&1 & echo $!"
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.strip()
    options = {"child": {}, "own session": {"start_new_session": True}, "no environment": {"env": {}}}[manner]
    return str(subprocess.Popen(sleep, **options).pid)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
