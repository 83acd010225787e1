"""Semantic Kernel against a gateway: `kernel.py TASK`."""

import asyncio
import sys

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Adder:
    """A plugin."""

    @kernel_function(name="add")
    def add(self, left: int, right: int) -> int:
        """Add two whole numbers."""
        return left + right


async def main(task: str) -> None:
    """Run the agent to its end."""
    model = OpenAIChatCompletion(ai_model_id="policy")
    agent = ChatCompletionAgent(service=model, name="adder", instructions="You add.", plugins=[Adder()])
    sys.stdout.write(str(await agent.get_response(messages=task)))


asyncio.run(main(sys.argv[1]))
