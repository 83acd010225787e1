"""CrewAI against a gateway: `crew.py TASK`."""

import os
import sys

from crewai import LLM as ChatModel
from crewai import Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(left: int, right: int) -> int:
    """Add two whole numbers."""
    return left + right


model = ChatModel(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(role="adder", goal="Add.", backstory="You add.", llm=model, tools=[add])
crew = Crew(agents=[agent], tasks=[Task(description=sys.argv[1], expected_output="A number.", agent=agent)])
sys.stdout.write(str(crew.kickoff()))
