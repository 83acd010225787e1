"""Claude Code, through its SDK, with a gateway: `claude.py TASK`. It may run commands without asking."""

import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, query


async def main(task: str) -> None:
    """Run the agent to its end."""
    options = ClaudeAgentOptions(
        allowed_tools=["Bash"], max_turns=4, model="policy", system_prompt="You add.", tools=["Bash"]
    )
    async for message in query(prompt=task, options=options):
        sys.stdout.write(f"{message}\n")


asyncio.run(main(sys.argv[1]))
