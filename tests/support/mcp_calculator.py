"""An MCP server whose tools add, fail, hang, die and flood: over stdio, or HTTP on the port that it is given."""

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


@server.tool()
def environment(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "none")


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
    """Takes long, while the server answers others."""
    await asyncio.sleep(600)
    return "late"


@server.tool()
async def freeze() -> str:
    """Takes long, and the whole server with it."""
    time.sleep(600)
    return "late"


@server.tool()
def flood(size: int) -> str:
    """Give size characters."""
    return "x" * size


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
