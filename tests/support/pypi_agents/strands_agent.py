"""Strands Agents against a gateway: `strands_agent.py TASK`."""

import os
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(left: int, right: int) -> int:
    """Add two whole numbers."""
    return left + right


client = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
agent = Agent(model=OpenAIModel(client_args=client, model_id="policy"), tools=[add], system_prompt="You add.")
sys.stdout.write(str(agent(sys.argv[1])))
