"""Requests of an agent and of a session's owner to a gateway."""

from typing import Any

import httpx
import openai
from chat_model import TOOLS


def plain_client() -> httpx.AsyncClient:
    """Return a client that does not load TLS certificates, because that is slow."""
    return httpx.AsyncClient(timeout=50, verify=False)


async def said(gateway: Any, key: str, messages: list[Any], *, max_retries: int = 0, **fields: Any) -> dict[str, Any]:
    """Return the model's answer to a conversation."""
    about = {"base_url": f"{gateway.url}/v1", "api_key": key, "max_retries": max_retries}
    async with openai.AsyncOpenAI(**about, http_client=plain_client()) as client:
        whole = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS, **fields)
    return whole.choices[0].message.model_dump(exclude_none=True)


async def owner(gateway: Any, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.owner_key}"}
    async with plain_client() as client:
        return await client.post(f"{gateway.url}{path}", json=body, headers=headers)
