"""Parsers of tool calls, one for each model family."""

from rl_rollout.tools.parsers.protocol import ParsedTurn, ToolParser
from rl_rollout.tools.parsers.registry import TOOL_PARSERS, VLLM, parser_for, resolve_parser

__all__ = ["TOOL_PARSERS", "VLLM", "ParsedTurn", "ToolParser", "parser_for", "resolve_parser"]
