"""smolagents against a gateway: `smol.py code TASK` or `smol.py tools TASK`."""

import os
import sys

from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(left: int, right: int) -> int:
    """Add two whole numbers.

    Args:
        left: One of them.
        right: The other one.
    """
    return left + right


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = {"code": CodeAgent, "tools": ToolCallingAgent}[sys.argv[1]]
agent = kind(tools=[add], model=model, max_steps=4, verbosity_level=LogLevel.OFF)
sys.stdout.write(str(agent.run(sys.argv[2])))
