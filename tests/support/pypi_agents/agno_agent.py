"""Agno against a gateway: `agno_agent.py TASK`."""

import sys

from agno.agent import Agent
from agno.models.openai import OpenAIChat


def add(left: int, right: int) -> str:
    """Add two whole numbers."""
    return str(left + right)


agent = Agent(model=OpenAIChat(id="policy"), tools=[add], instructions="You add.", telemetry=False)
sys.stdout.write(str(agent.run(sys.argv[1]).content))
