"""A tokenizer with a chat template, and an engine that generates given texts, for tests of loops."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_core.data.records import Prompt
from rl_rollout import GenerateRequest, PromptTokenizer, RewardScorer, Rollout, SamplingParams, quick
from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine

SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS, "é"))}

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]

# Like Qwen3's: drops the thinking of earlier turns, adds an empty one to the last, and shows results as user turns.
THINKING = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


def make_tokenizer(chat_template: str | None = CHATML, *, special: Sequence[str] = SPECIAL) -> PromptTokenizer:
    """Return a tokenizer with one token per character, and control tokens; the end token is <|im_end|>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*special, *CHARACTERS, "é"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>" if "<|im_end|>" in special else special[-1],
        additional_special_tokens=[token for token in special if token != "<pad>"],
    )
    fast.chat_template = chat_template
    return PromptTokenizer(fast)


def encode(tokenizer: PromptTokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode([text], add_special_tokens=False)[0], dtype=np.int32)


class Speaker:
    """An engine whose response is `say(text)` for the text before it."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        say: Callable[[str], str],
        *,
        end: str = "<|im_end|>",
        max_model_len: int = 4096,
    ) -> None:
        self.tokenizer = tokenizer
        self.heard: list[str] = []
        self._say = say
        self.engine = ScriptedEngine(
            self._respond,
            end_token_ids=[id_ for id_ in (tokenizer.token_id(end),) if id_ is not None],
            traits=EngineTraits(name="speaker", max_model_len=max_model_len, vocab_size=1 << 20),
        )

    def _respond(self, request: GenerateRequest, _index: int) -> list[int]:
        (text,) = self.tokenizer.decode([request.input_ids], skip_special_tokens=False)
        self.heard.append(text)
        return encode(self.tokenizer, self._say(text)).tolist()


def in_turn(*turns: str) -> Callable[[str], str]:
    """Return each text in turn; the number of assistant turns in the prompt selects it."""
    return lambda heard: turns[min(heard.count("<|im_start|>assistant") - 1, len(turns) - 1)]


def chat_prompt(tokenizer: PromptTokenizer, text: str, uid: str = "p") -> Prompt:
    messages = ({"role": "user", "content": text},)
    return Prompt(uid=uid, input_ids=encode(tokenizer, tokenizer.render(messages)), messages=messages)


def run_loop(
    loop: Any, speaker: Speaker, prompts: Sequence[Prompt], *, num_sessions: int = 1, **options: Any
) -> list[Any]:
    """Run every group through a Rollout that audits all sessions."""
    reward = options.pop("reward", quick(lambda given: float(len(given.response_text))))
    sampling = options.pop("sampling", SamplingParams(max_tokens=2000))
    with_baseline = options.pop("with_baseline", False)
    tokenizer = speaker.tokenizer
    rollout = Rollout(
        speaker.engine, loop, scorer=RewardScorer(reward), decode=tokenizer.decode, tokenizer=tokenizer, **options
    )

    async def everything() -> list[Any]:
        await speaker.engine.start()
        return await rollout.run(
            prompts, num_sessions=num_sessions, sampling=sampling, seed=5, with_baseline=with_baseline
        )

    try:
        return asyncio.run(everything())
    finally:
        rollout.close()
