"""OpenAI's Completions API: continues a prompt of text or tokens without a chat template."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from openai.types import Completion

from rl_core.data import Json
from rl_rollout.gateway.agent_requests import AgentRequest, Answer, StreamedAnswer
from rl_rollout.gateway.apis.chat_completions import usage
from rl_rollout.gateway.apis.reading import as_object, asks_for_usage, check_fields
from rl_rollout.gateway.apis.streams import WireApi, data
from rl_rollout.gateway.refusals import refused_field
from rl_rollout.gateway.sampling import read_sampling

READ = (
    "prompt", "model", "n", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop",
    "logprobs", "stop_token_ids",
)  # fmt: skip
WITHOUT_EFFECT = ("user",)


class Completions(WireApi):
    """A Completions request."""

    names: Mapping[str, str] = {"messages": "prompt"}

    def __init__(self, body: Mapping[str, Json], model: str) -> None:
        """Parse a request; `model` is the model name in the answer.

        Raises:
            RefusedError: A field is invalid or not supported.
        """
        check_fields(body, (*READ, *WITHOUT_EFFECT))
        if body.get("logprobs") not in (None, 0, False):
            raise refused_field("logprobs", body["logprobs"], "0: only logprobs of sampled tokens are available")
        self.ask = AgentRequest(
            prompt=_prompt(body.get("prompt")),
            sampling=read_sampling(body, max_tokens="max_tokens", stop="stop", without_effect=WITHOUT_EFFECT),
            num_choices=body.get("n") or 1,
        )
        self._with_usage, self._with_logprobs = asks_for_usage(body), body.get("logprobs") is not None
        self._head: dict[str, Json] = {"created": int(time.time()), "model": model, "object": "text_completion"}

    def whole(self, answer: Answer) -> str:
        """Return the answer as JSON."""
        self._head["id"] = f"cmpl-{answer.name}"
        choices = [self._choice(index, one.message.content, answer) for index, one in enumerate(answer.samples)]
        return self._json(choices, usage=usage(answer))

    def begin(self, live: StreamedAnswer) -> Iterable[str]:
        """Yield no events: the first text begins the stream."""
        self._head["id"] = f"cmpl-{live.name}"
        return ()

    def piece(self, index: int, kind: str, delta: str) -> Iterable[str]:  # noqa: ARG002 - everything is text
        """Yield the event for new text of a choice."""
        yield data(self._json([self._choice(index, delta)]))

    def end(self, answer: Answer) -> Iterable[str]:
        """Yield the finish reason of each choice, and the usage if it was requested."""
        for index in range(len(answer.samples)):
            yield data(self._json([self._choice(index, "", answer)]))
        if self._with_usage:
            yield data(self._json([], usage=usage(answer)))
        yield data("[DONE]")

    def _choice(self, index: int, text: str, answer: Answer | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
        if answer is not None:
            sample = answer.samples[index]
            choice["finish_reason"] = sample.generation.finish_reason
            if self._with_logprobs:
                logprobs = sample.generation.logprobs.tolist()
                choice["logprobs"] = {"tokens": answer.texts_of(sample), "token_logprobs": logprobs}
        return choice

    def _json(self, choices: list[dict[str, Any]], **fields: Json) -> str:
        made = Completion.model_construct(**self._head, choices=choices, **fields)  # a chunk has no finish_reason yet
        return made.model_dump_json(exclude_unset=True, warnings=False)


class TokenPrompts(Completions):
    """A request of vLLM's `/inference/v1/generate`, for programs that encode turns themselves."""

    names: Mapping[str, str] = {"messages": "token_ids", "prompt": "token_ids"}

    def __init__(self, body: Mapping[str, Json], model: str) -> None:
        """Parse a request; sampling parameters that the gateway does not know have no effect.

        Raises:
            RefusedError: A field is invalid, or the request asks for a stream.
        """
        asked = as_object(body.get("sampling_params"), "sampling_params")
        known = {name: value for name, value in asked.items() if name in READ}
        ids = body.get("token_ids")
        if body.get("stream") or not isinstance(ids, list) or not ids:
            raise refused_field("token_ids", ids, "a list of token ids, without stream")
        super().__init__({"prompt": ids, **known, "logprobs": 0}, model)

    def whole(self, answer: Answer) -> str:
        """Return the answer as JSON."""
        choices = []
        for index, generation in enumerate(sample.generation for sample in answer.samples):
            ids, logprobs = generation.token_ids.tolist(), generation.logprobs.tolist()
            content = [
                {"token": f"token_id:{token}", "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=True)
            ]
            choice = {"index": index, "token_ids": ids, "finish_reason": generation.finish_reason}
            choices.append({**choice, "logprobs": {"content": content}})
        return json.dumps({"request_id": answer.name, "choices": choices})


def _prompt(given: Json) -> str | list[int]:
    """Return the single prompt of a request.

    Raises:
        RefusedError: The prompt is invalid, or there are several.
    """
    one = given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list) else given
    is_ids = isinstance(one, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in one)
    if not one or not (isinstance(one, str) or is_ids):
        raise refused_field("prompt", given, "a string or a list of token ids, one prompt per request")
    return one
