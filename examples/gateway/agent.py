"""An ordinary agent: two turns with OpenAI's SDK, given a base URL and a key."""

from typing import Any

import openai


async def run_agent(base_url: str, api_key: str, messages: list[Any]) -> float:
    """Ask, ask for more, and return the share of digits in the model's messages as the reward."""
    said = ""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=600) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            message = answer.choices[0].message
            said += message.content or ""
            messages = [*messages, message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
    return sum(character.isdecimal() for character in said) / max(len(said), 1)
