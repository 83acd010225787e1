"""A judge behind a URL that speaks OpenAI's chat completions."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rl_core.data import Json
from rl_core.errors import RolloutError
from rl_core.record_fields import PositiveFloat, PositiveInt, settings_record
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.rewards.http_reward import HttpService, RewardServiceError
from rl_rollout.rewards.outputs import cut

PATH = "/chat/completions"
TOP_LOGPROBS = 20


class JudgeBudgetError(RolloutError):
    """A judge's budget of requests is used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAnswer:
    """One answer of a judge.

    Attributes:
        text: The answer.
        finish_reason: Why it ended: "stop", "length", "abort", or another word of a service.
        first_tokens: Probabilities of the most likely first tokens, if they were asked for.
    """

    text: str
    finish_reason: str
    first_tokens: Mapping[str, float] = field(default_factory=dict)


@settings_record
class JudgeEndpoint(HttpService):
    """A model that judges behind a URL that speaks OpenAI's chat completions, such as a vLLM server or a provider.

    Attributes:
        name: The model's name there.
        max_requests: Maximum number of requests of this process, retries included, validation apart. Later sessions
            fail with JudgeBudgetError. None sets no limit.
        extra_body: Further fields of each request, such as {"reasoning_effort": "low"}. With `max_completion_tokens`,
            `max_tokens` is not sent.
    """

    owner: ClassVar[str] = "the model of reward 'judge'"
    kind: ClassVar[str] = "the judge at"
    name: str
    timeout_s: PositiveFloat = 60.0
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

    async def answers(
        self, question: str, sampling: SamplingParams, *, num_samples: int, with_logprobs: bool
    ) -> list[JudgeAnswer]:
        """Ask in a user message, once for each sample.

        Raises:
            JudgeBudgetError: The budget is used up.
            RewardServiceError: The service cannot be reached, is busy, or answers without a message.
            DeadlineError: The service took too long, after all retries.
            DataError: The service refuses the request.
        """
        seeds = [None if sampling.seed is None else sampling.seed + index for index in range(num_samples)]
        return list(
            await asyncio.gather(
                *(self._answer(question, replace(sampling, seed=seed), with_logprobs) for seed in seeds)
            )
        )

    async def _answer(self, question: str, sampling: SamplingParams, with_logprobs: bool) -> JudgeAnswer:
        body = {"model": self.name, "messages": [{"role": "user", "content": question}]}
        body |= {} if "max_completion_tokens" in self.extra_body else {"max_tokens": sampling.max_tokens}
        body |= {"temperature": sampling.temperature} | ({} if sampling.seed is None else {"seed": sampling.seed})
        body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if with_logprobs else {}
        reply = await self.ask(json.dumps(body | dict(self.extra_body)).encode())
        try:
            choice = json.loads(reply)["choices"][0]
            first = choice["logprobs"]["content"][0]["top_logprobs"] if with_logprobs else ()
            return JudgeAnswer(
                text=str(choice["message"]["content"] or ""),
                finish_reason=choice.get("finish_reason") or "stop",
                first_tokens={one["token"]: math.exp(one["logprob"]) for one in first},
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            wanted = "a message with logprobs" if with_logprobs else "a message"
            shown = cut(reply, max_characters=200)
            raise RewardServiceError(f"{self.answerer} answered without {wanted}: {shown!r}.") from error

    async def _post(self, client: Any, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        if self.max_requests is not None and self.sent["requests"] >= self.max_requests:
            raise JudgeBudgetError(
                f"{self.answerer} has had max_requests = {self.max_requests} requests. Raise it, or judge fewer responses."
            )
        self.sent["requests"] += 1
        return await HttpService._post(self, client, content)
