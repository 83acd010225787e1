"""Tool parsers by name. Other packages add parsers with the entry point group `rl_rollout.tool_parsers`."""

from rl_core.errors import SettingsError
from rl_core.registry import Registry
from rl_rollout.tools.parsers.protocol import ToolParser
from rl_rollout.user_files import find_in

TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool parser",
    {
        "hermes": "rl_rollout.tools.parsers.hermes:HermesParser",
        "qwen3_coder": "rl_rollout.tools.parsers.qwen3_coder:Qwen3CoderParser",
        "gpt_oss": "rl_rollout.tools.parsers.gpt_oss:GptOssParser",
    },
    group="rl_rollout.tool_parsers",
)


def resolve_parser(reference: str) -> ToolParser:
    """Create the parser with this name, or at `path.py:Class`, without arguments.

    Raises:
        SettingsError: The name, file or class does not exist, or has no `parse`.
    """
    parser_class = find_in(TOOL_PARSERS, reference)
    if not isinstance(parser_class, type) or not hasattr(parser_class, "parse"):
        raise SettingsError(f"tool parser {reference!r} must be a class with `parse`; found {parser_class!r}.")
    parser: ToolParser = parser_class()
    return parser
