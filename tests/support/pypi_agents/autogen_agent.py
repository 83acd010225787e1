"""AutoGen against a gateway: `autogen_agent.py TASK`."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(left: int, right: int) -> int:
    """Add two whole numbers."""
    return left + right


async def main(task: str) -> None:
    """Run the agent to its end."""
    told = {"function_calling": True, "json_output": False, "vision": False, "structured_output": False}
    client = OpenAIChatCompletionClient(model="policy", model_info={**told, "family": "unknown"})
    agent = AssistantAgent("adder", client, tools=[add], system_message="You add.", max_tool_iterations=3)
    result = await agent.run(task=task)
    sys.stdout.write(result.messages[-1].to_text())
    await client.close()


asyncio.run(main(sys.argv[1]))
