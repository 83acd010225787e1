"""LangChain's agent, which runs on LangGraph, against a gateway: `langchain_agent.py TASK`."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(left: int, right: int) -> int:
    """Add two whole numbers."""
    return left + right


agent = create_agent(ChatOpenAI(model="policy"), tools=[add], system_prompt="You add.")
answer = agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
sys.stdout.write(answer["messages"][-1].text)
