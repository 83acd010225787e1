"""Anthropic's own tool runner against a gateway: `tool_runner.py TASK`."""

import sys

import anthropic


@anthropic.beta_tool
def add(left: int, right: int) -> str:
    """Add two whole numbers.

    Args:
        left: One of them.
        right: The other one.
    """
    return str(left + right)


task = {"role": "user", "content": sys.argv[1]}
runner = anthropic.Anthropic().beta.messages.tool_runner(model="policy", max_tokens=500, tools=[add], messages=[task])
sys.stdout.write(str(runner.until_done().content))
