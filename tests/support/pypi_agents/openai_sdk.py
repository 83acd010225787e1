"""openai-agents against a gateway: `openai_sdk.py chat TASK` or `openai_sdk.py responses TASK`."""

import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api({"chat": "chat_completions", "responses": "responses"}[sys.argv[1]])


@function_tool
def add(left: int, right: int) -> int:
    """Add two whole numbers."""
    return left + right


checker = Agent(name="checker", instructions="You check sums.", model="policy", tools=[add])
agent = Agent(name="adder", instructions="You add.", model="policy", tools=[add], handoffs=[checker])
sys.stdout.write(Runner.run_sync(agent, sys.argv[2], max_turns=6).final_output)
