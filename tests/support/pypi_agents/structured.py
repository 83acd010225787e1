"""Frameworks that ask for a response format, against a gateway: `structured.py NAME TASK`."""

import sys

import openai
from pydantic import BaseModel


class Sum(BaseModel):
    """A sum."""

    total: int


def with_instructor(task: str) -> Sum:
    """Return the answer of Instructor in its JSON mode."""
    import instructor

    client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON)
    return client.chat.completions.create(
        model="policy", response_model=Sum, messages=[{"role": "user", "content": task}]
    )


def with_langchain(task: str) -> Sum:
    """Return the answer of LangChain's structured output."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy").with_structured_output(Sum).invoke(task)


def with_outlines(task: str) -> Sum:
    """Return the answer of Outlines."""
    import outlines

    return Sum.model_validate_json(outlines.from_openai(openai.OpenAI(), "policy")(task, Sum))


ASKING = {"instructor": with_instructor, "langchain": with_langchain, "outlines": with_outlines}
sys.stdout.write(str(ASKING[sys.argv[1]](sys.argv[2]).total))
