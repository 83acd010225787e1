"""LlamaIndex against a gateway: `llama.py TASK`. It accepts only names of OpenAI's models."""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI


def add(left: int, right: int) -> int:
    """Add two whole numbers."""
    return left + right


async def main(task: str) -> None:
    """Run the agent to its end."""
    model = OpenAI(model="gpt-4o", api_base=os.environ["OPENAI_BASE_URL"])
    agent = FunctionAgent(tools=[add], llm=model, system_prompt="You add.")
    sys.stdout.write(str(await agent.run(task)))


asyncio.run(main(sys.argv[1]))
