"""A gateway on a free port, whose engine generates given texts, for tests with real clients."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from chat_model import CHATML, Speaker, make_tokenizer

from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.gateway.server import Gateway, GatewayOptions
from rl_rollout.gateway.service import ServiceOptions

ResultT = TypeVar("ResultT")


@asynccontextmanager
async def gateway_site(
    say: Callable[[str], str],
    *,
    template: str = CHATML,
    sampling: SamplingParams | None = None,
    service: ServiceOptions | None = None,
    engine: Any = None,
    on_finished: Any = None,
    max_model_len: int = 100_000,
    **options: Any,
) -> AsyncIterator[Gateway]:
    tokenizer = make_tokenizer(template)
    if engine is None:
        engine = Speaker(tokenizer, lambda heard: say(heard) + "<|im_end|>", max_model_len=max_model_len).engine
    await engine.start()
    made = Gateway(
        engine,
        tokenizer,
        GatewayOptions(service=service or ServiceOptions(), **options),
        sampling=sampling or SamplingParams(max_tokens=2000),
        on_finished=on_finished,
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()
        await engine.close()


def run(test: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run a test's coroutine with a deadline of a minute, and return its result."""

    async def within() -> ResultT:
        async with asyncio.timeout(60):
            return await test()

    return asyncio.run(within())
