"""AG2 against a gateway: `ag2_agent.py TASK`."""

import asyncio
import sys

from ag2 import Agent, tool
from ag2.config import OpenAIConfig


@tool
async def add(left: int, right: int) -> str:
    """Add two whole numbers."""
    return str(left + right)


async def main(task: str) -> None:
    """Run the agent to its end."""
    agent = Agent("adder", prompt="You add.", config=OpenAIConfig(model="policy"), tools=[add])
    reply = await agent.ask(task)
    sys.stdout.write(str(reply.body))


asyncio.run(main(sys.argv[1]))
