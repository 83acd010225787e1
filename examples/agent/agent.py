"""An ordinary agent with a calculator: it asks a model through OpenAI's API and prints the answer.

OPENAI_BASE_URL and OPENAI_API_KEY select the model. It imports only the standard library, so it starts quickly.
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
    """Return the model's next message."""
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message


def multiply(arguments: str) -> str:
    """Return the product for a call's JSON arguments, or "0" if they are invalid."""
    try:
        given = json.loads(arguments)
        return str(int(given["left"]) * int(given["right"]))
    except (KeyError, TypeError, ValueError):
        return "0"


def answer(question: str) -> str:
    """Return the model's final answer; empty if it has none after `MAX_TURNS`."""
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
    parser.add_argument("question", help='a product, such as "37*58"')
    print(answer(parser.parse_args().question))
