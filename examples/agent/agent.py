"""An agent with a calculator that knows nothing of training: it asks a model over OpenAI's API, and prints its answer.

OPENAI_BASE_URL and OPENAI_API_KEY say which model. It needs the standard library alone, so that it starts at once.
"""

import argparse
import json
import os
import urllib.request
from typing import Any

MAX_TURNS = 3
NUMBER = {"type": "integer"}
TOOL = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "parameters": {"type": "object", "properties": {"left": NUMBER, "right": NUMBER}, "required": ["left", "right"]},
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message."""
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message


def multiply(arguments: str) -> str:
    """What the calculator says to a call of it, which may be nonsense."""
    try:
        given = json.loads(arguments)
        return str(int(given["left"]) * int(given["right"]))
    except (KeyError, TypeError, ValueError):
        return "0"


def answer(question: str) -> str:
    """What the model says in the end; empty when it does not come to one."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        message = ask(messages)
        calls = message.get("tool_calls") or []
        if not calls:
            return str(message.get("content") or "")
        messages.append(message)
        for call in calls:
            result = multiply(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", help='such as "37*58"')
    print(answer(parser.parse_args().question))
