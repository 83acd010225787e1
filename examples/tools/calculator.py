"""The calculator of the tools example: an MCP server over stdin and stdout, written with the official library."""

import argparse

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="WARNING")


@server.tool()
def multiply(left: int, right: int) -> str:
    """Multiply two whole numbers."""
    return str(left * right)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    server.run("stdio")
