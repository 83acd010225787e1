"""pydantic-ai against a gateway: `pydantic_agent.py openai TASK` or `pydantic_agent.py anthropic TASK`."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel

model = {"openai": OpenAIChatModel, "anthropic": AnthropicModel}[sys.argv[1]]("policy")
agent = Agent(model, system_prompt="You add.", retries=2)


@agent.tool_plain
def add(left: int, right: int) -> int:
    """Add two whole numbers."""
    return left + right


async def main() -> None:
    """Run twice in one conversation; stream the second run."""
    first = await agent.run(sys.argv[2])
    async with agent.run_stream("Sure?", message_history=first.all_messages()) as stream:
        sys.stdout.write(f"{first.output} {await stream.get_output()}")


asyncio.run(main())
