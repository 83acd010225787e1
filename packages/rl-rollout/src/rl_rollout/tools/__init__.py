"""Tools that a model can call, parsers that read its calls, and runners that execute them."""

from rl_rollout.tools.function import FunctionTool, tool
from rl_rollout.tools.mcp_options import McpServerOptions
from rl_rollout.tools.protocol import CallOutcome, TextAndImages, Tool, ToolCall, ToolResult, tool_schema
from rl_rollout.tools.runner import TOOLS, CallOptions, ToolBox, ToolRunner, resolve_tool, resolve_tools

__all__ = [
    "TOOLS",
    "CallOptions",
    "CallOutcome",
    "FunctionTool",
    "McpServerOptions",
    "TextAndImages",
    "Tool",
    "ToolBox",
    "ToolCall",
    "ToolResult",
    "ToolRunner",
    "resolve_tool",
    "resolve_tools",
    "tool",
    "tool_schema",
]
