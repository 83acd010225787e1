"""Haystack against a gateway: `haystack_agent.py TASK`."""

import sys
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def add(left: Annotated[int, "One of them."], right: Annotated[int, "The other one."]) -> str:
    """Add two whole numbers."""
    return str(left + right)


agent = Agent(chat_generator=OpenAIChatGenerator(model="policy"), tools=[add], system_prompt="You add.")
result = agent.run(messages=[ChatMessage.from_user(sys.argv[1])])
sys.stdout.write(str(result["messages"][-1].text))
