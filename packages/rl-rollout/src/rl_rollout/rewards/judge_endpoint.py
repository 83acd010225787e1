"""A judge behind a URL that speaks OpenAI's chat completions."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar

from rl_core.data import Json
from rl_core.errors import RolloutError
from rl_core.record_fields import PositiveFloat, PositiveInt, settings_record
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.rewards.http_reward import HttpService, RewardServiceError
from rl_rollout.rewards.outputs import cut

PATH = "/chat/completions"


class JudgeBudgetError(RolloutError):
    """A judge's budget of requests is used up."""


@settings_record
class JudgeEndpoint(HttpService):
    """A model that judges behind a URL that speaks OpenAI's chat completions, such as a vLLM server or a provider.

    Attributes:
        name: The model's name there.
        max_requests: Maximum number of requests of this reward in this process, retries included. Further sessions fail
            with JudgeBudgetError. None sets no limit.
        extra_body: Further fields of each request, such as {"reasoning_effort": "low"}. With `max_completion_tokens`,
            `max_tokens` is not sent.
    """

    owner: ClassVar[str] = "the model of reward 'judge'"
    kind: ClassVar[str] = "the judge at"
    name: str
    timeout_s: PositiveFloat = 30.0
    max_requests: PositiveInt | None = None
    extra_body: Mapping[str, Json] = field(default_factory=dict)
    sent: Counter[str] = field(init=False, repr=False, compare=False, default_factory=Counter)

    def __post_init__(self) -> None:
        """Check the options, and complete a base URL such as `https://host/v1`.

        Raises:
            MissingExtraError: httpx is not installed.
            SettingsError: An option is invalid.
        """
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix(PATH) + PATH)
        HttpService.__post_init__(self)

    async def answers(self, question: str, sampling: SamplingParams, *, num_samples: int) -> list[tuple[str, str]]:
        """Ask in a user message, once for each sample; return texts and finish reasons.

        Raises:
            JudgeBudgetError: The budget is used up.
            RewardServiceError: The service cannot be reached, is busy, or answers without a message.
            DeadlineError: The service took too long, after all retries.
            DataError: The service refuses the request.
        """
        seeds = [None if sampling.seed is None else sampling.seed + index for index in range(num_samples)]
        return await asyncio.gather(*(self._answer(question, replace(sampling, seed=seed)) for seed in seeds))

    async def _answer(self, question: str, sampling: SamplingParams) -> tuple[str, str]:
        body: dict[str, Json] = {"model": self.name, "messages": [{"role": "user", "content": question}]}
        body |= {"temperature": sampling.temperature} | ({} if sampling.seed is None else {"seed": sampling.seed})
        body |= {} if "max_completion_tokens" in self.extra_body else {"max_tokens": sampling.max_tokens}
        reply = await self.ask(json.dumps(body | dict(self.extra_body)).encode())
        try:
            choice = json.loads(reply)["choices"][0]
            return choice["message"]["content"] + "", choice.get("finish_reason") or "stop"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            shown = cut(reply, max_characters=200)
            raise RewardServiceError(f"{self.answerer} answered without a message: {shown!r}.") from error

    async def _post(self, client: Any, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        if self.max_requests is not None and self.sent["requests"] >= self.max_requests:
            spent = f"max_requests = {self.max_requests} of {self.answerer} are used up"
            raise JudgeBudgetError(f"{spent}. Raise it, or judge fewer responses.")
        self.sent["requests"] += 1
        return await HttpService._post(self, client, content)
