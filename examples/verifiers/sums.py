"""An environment of verifiers 0.4: tasks, their reward and the harness. Its id is the name of this file."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["AskTwice", "Sums"]


class Sum(vf.TaskData):
    """A sum and its result."""

    result: str


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    """Rewards the last answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last message is the result, else 0."""
        return float(trace.branches[-1].messages[-1].content == self.data.result)


class Sums(vf.Taskset[SumTask]):
    """Sums of two digits."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks; the prompts' column `task` is their index from 0."""
        for left in range(10):
            for right in range(10):
                yield SumTask(Sum(prompt=f"{left}+{right}=", result=str(left + right)))


class AskTwice(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks again whether the model is sure; it runs in this process and starts no program."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: vf.TaskData,
        **_: Any,
    ) -> vf.ProgramResult:
        """Run two turns; every model call goes through verifiers' endpoint, which records the tokens."""
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for following in ("Sure?", None):
                completion = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": completion.choices[0].message.content or ""})
                if following is not None:
                    messages.append({"role": "user", "content": following})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
