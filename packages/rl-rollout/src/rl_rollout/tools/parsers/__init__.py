"""Parsers of tool calls, one for each model family."""

from rl_rollout.tools.parsers.protocol import TOOL_PARSERS, VLLM, ParsedTurn, ToolParser, parser_for, resolve_parser

__all__ = ["TOOL_PARSERS", "VLLM", "ParsedTurn", "ToolParser", "parser_for", "resolve_parser"]
