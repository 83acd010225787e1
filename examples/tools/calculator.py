"""The calculator of the tools example: an MCP server over stdin and stdout, by the official library."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="WARNING")


@server.tool()
def multiply(left: int, right: int) -> str:
    """Multiply two whole numbers."""
    return str(left * right)


if __name__ == "__main__":
    server.run("stdio")
